"""`dynguard run`: unmodified scripts as users write them, started as python starts them."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from dynguard import runner
from dynguard.errors import DynguardError, OptionError, PluginError, RunDirectoryError, SetupError
from dynguard.history import History
from dynguard.torch import globalhooks

PLAIN = """
    import torch
    from torch import nn

    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
            self.head = nn.Linear(16, 1)

        def forward(self, x):
            return self.head(self.encoder(x))

    def main():
        model = Net()
        opt = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(120):
            x = torch.randn(32, 8)
            y = torch.sin(x.sum(1, keepdim=True)) + torch.randn(32, 1)
            if step == 100:
                x[3, 5] = float("nan")
            loss = nn.functional.mse_loss(model(x), y)
            opt.zero_grad()
            loss.backward()
            if step == 80:
                model.head.weight.grad *= 1000
            opt.step()
        assert all(p.isfinite().all() for p in model.parameters())
        torch.save(model.state_dict(), "weights.pt")

    if __name__ == "__main__":
        main()
"""
TWO_OPTIMIZERS = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    discriminator = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    g_opt = torch.optim.Adam(generator.parameters(), lr=1e-3)
    d_opt = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    bce = nn.functional.binary_cross_entropy_with_logits
    for step in range(100):
        real = torch.randn(64, 2) * 0.5 + 1.0
        fake = generator(torch.randn(64, 4))
        d_loss = bce(discriminator(real), torch.ones(64, 1)) + bce(discriminator(fake.detach()), torch.zeros(64, 1))
        d_opt.zero_grad()
        d_loss.backward()
        if step == 70:
            discriminator[2].weight.grad.mul_(1000)
        d_opt.step()
        g_loss = bce(discriminator(fake), torch.ones(64, 1))
        g_opt.zero_grad()
        g_loss.backward()
        if step == 85:
            generator[0].weight.grad.mul_(1000)
        g_opt.step()
"""
ARGPARSE = """
    import argparse
    import os
    import sys

    assert "torch" not in sys.modules, "torch was imported before the script could set up its environment"
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    from torch import nn

    from trainer.data import batches

    def parse():
        parser = argparse.ArgumentParser()
        parser.add_argument("--steps", type=int, required=True)
        parser.add_argument("--bad-step", type=int, required=True)
        parser.add_argument("--mode", choices=["fast", "slow"], default="fast")
        return parser.parse_args()

    class Trainer:
        def __init__(self, args):
            self.args = args
            self.embed = nn.Embedding(50, 16)
            self.rnn = nn.GRU(16, 16, batch_first=True)
            self.out = nn.Linear(16, 50)
            params = [*self.embed.parameters(), *self.rnn.parameters(), *self.out.parameters()]
            self.optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)

        def fit(self):
            for step, tokens in enumerate(batches(self.args.steps)):
                hidden, _ = self.rnn(self.embed(tokens[:, :-1]))
                logits = self.out(hidden)
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                if step == self.args.bad_step:
                    loss = loss * float("nan")
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()

    assert __name__ == "__main__"
    assert torch.get_num_threads() == 1
    Trainer(parse()).fit()
    sys.exit(7)
"""
DATA = """
    import torch

    def batches(count):
        generator = torch.Generator().manual_seed(3)
        for _ in range(count):
            yield torch.randint(50, (8, 12), generator=generator)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path.name


def history(folder: Path) -> History:
    (directory,) = (folder / "dynguard-runs").iterdir()
    return History(directory)


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )


def found(folder: Path) -> set[tuple[int, str, str]]:
    with history(folder) as record:
        return {(f.step, f.source, f.subject) for f in record.findings() if f.action.intervenes}


def test_plain_loop(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = runner.run(write(here / "train.py", PLAIN))
    assert code == 0
    spikes = found(here)
    assert (80, "optimizer0", "head.weight") in spikes
    nan = {subject for step, _, subject in spikes if step == 100}
    assert nan
    assert nan <= {"encoder.0.weight", "encoder.0.bias"}
    assert {step for step, _, _ in spikes} == {80, 100}
    with history(here) as record:
        assert {(i.step, i.action.value, i.carried_out) for i in record.interventions()} == {
            (80, "skip", True),
            (100, "skip", True),
        }
        assert record.steps == 120
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("dynguard: ")
    assert "2 interventions in 120 steps" in last
    assert f"dynguard report {Path('dynguard-runs')}" in last


def test_a_run_without_faults_ends_with_the_weights_of_python_itself(here: Path) -> None:
    healthy = PLAIN.replace("step == 80", "False").replace("step == 100", "False")
    script = write(here / "train.py", healthy)
    runpy.run_path(script, run_name="__main__")
    expected = torch.load("weights.pt")
    Path("weights.pt").unlink()
    assert runner.run(script) == 0
    weights = torch.load("weights.pt")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_two_optimizers_are_two_sources_with_the_names_of_their_own_models(here: Path) -> None:
    assert runner.run(write(here / "gan.py", TWO_OPTIMIZERS)) == 0
    assert (70, "optimizer0", "2.weight") in found(here)  # the discriminator's optimizer steps first
    assert (85, "optimizer1", "0.weight") in found(here)
    assert {step for step, _, _ in found(here)} == {70, 85}


def test_a_module_with_argparse_in_a_process_of_its_own(here: Path) -> None:
    write(here / "trainer" / "data.py", DATA)
    write(here / "trainer" / "__init__.py", "")
    write(here / "trainer" / "train.py", ARGPARSE)
    done = python("-m", "dynguard.cli", "run", "--run-dir", "out/run", "-m", "trainer.train", "--steps", "60",
                  "--bad-step", "50", "--mode", "slow", cwd=here)  # fmt: skip
    assert done.returncode == 7, done.stderr
    with History(here / "out" / "run") as record:
        bad = [f for f in record.findings() if f.action.intervenes]
        assert {f.step for f in bad} == {50}
        # Three modules side by side, none inside another: named by the attributes that hold them.
        assert {f.subject.split(".")[0] for f in bad if f.subject} <= {"embed", "rnn", "out"}
        assert any(f.subject for f in bad)
    assert "dynguard report out/run" in done.stderr.splitlines()[-1]


def test_parameters_that_no_module_owns_are_named_by_their_place(here: Path) -> None:
    script = """
        import torch
        weight = torch.zeros(3, requires_grad=True)
        scale = torch.ones((), requires_grad=True)
        opt = torch.optim.SGD([{"params": [weight]}, {"params": [scale], "lr": 1e-3}], lr=1e-2)
        for step in range(5):
            opt.zero_grad()
            ((weight * scale - 1) ** 2).sum().backward()
            if step == 3:
                scale.grad.fill_(float("inf"))
            opt.step()
    """
    assert runner.run(write(here / "bare.py", script)) == 0
    assert (3, "optimizer0", "optimizer0.group1.param0") in found(here)


def test_the_first_step_of_all_is_judged(here: Path) -> None:
    script = """
        import torch
        model = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        opt.step()
        assert model.weight.isfinite().all()
    """
    assert runner.run(write(here / "first.py", script)) == 0
    assert (0, "optimizer0", "weight") in found(here)


def test_observe_changes_nothing(here: Path) -> None:
    script = """
        import torch
        model = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        (model(torch.ones(1, 2)) * float("nan")).sum().backward()
        opt.step()
        assert model.weight.isnan().all()
    """
    assert runner.run(write(here / "first.py", script), settings=runner.Settings(mode="observe")) == 0
    with history(here) as record:
        assert [i.carried_out for i in record.interventions()] == [False]


@pytest.mark.parametrize(
    ("ending", "code", "message"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no data')", 1, "no data\n"),
        ("raise SystemExit(True)", 1, ""),
    ],
)
def test_exit_codes(here: Path, capsys: pytest.CaptureFixture[str], ending: str, code: int, message: str) -> None:
    script = write(here / "end.py", f"import sys\nprint('done')\n{ending}\n")
    assert runner.run(script) == code
    out, err = capsys.readouterr()
    assert out == "done\n"
    assert err.startswith(message)
    assert err.removeprefix(message) == "dynguard: nothing was watched, as no optimizer of torch took a step\n"
    assert not (here / "dynguard-runs").exists()


CRASHES = {
    "deep": "import helper\ndef f(n):\n    return f(n - 1) if n else helper.divide(1, 0)\nf(2)\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('bad file') from e\n",
    "syntax": "x = 1\nif x\n    pass\n",
    "import": "import nothing_of_that_name\n",
    "callback": "import torch\np = torch.ones(1, requires_grad=True)\nopt = torch.optim.SGD([p], lr=0.1)\n"
    "def closure():\n    raise OSError('no batch')\nopt.step(closure)\n",
}


@pytest.mark.parametrize("kind", CRASHES)
def test_the_traceback_is_the_one_of_python_itself(here: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    write(here / "helper.py", "def divide(a, b):\n    return a / b\n")
    script = write(here / "crash.py", CRASHES[kind])
    expected = python(script, cwd=here)
    assert expected.returncode == 1
    assert runner.run(script) == 1
    *traceback, last = capsys.readouterr().err.splitlines(keepends=True)
    assert "".join(traceback) == expected.stderr
    assert last.startswith("dynguard: ")
    sys.modules.pop("helper", None)


def test_ctrl_c(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.run(write(here / "stop.py", "raise KeyboardInterrupt\n")) == 130
    assert "KeyboardInterrupt" in capsys.readouterr().err


def test_the_scripts_own_excepthook_is_called(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hook = sys.excepthook
    try:
        script = (
            "import sys\nsys.excepthook = lambda kind, error, trace: print('caught', error)\nraise OSError('disk')\n"
        )
        assert runner.run(write(here / "hook.py", script)) == 1
    finally:
        sys.excepthook = hook
    assert capsys.readouterr().out == "caught disk\n"


def test_a_stop_by_the_guard(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "dynguard.toml", '[plugin.spike]\naction = "raise"\n')
    assert runner.run(write(here / "train.py", PLAIN)) == 1
    err = capsys.readouterr().err
    traceback = err[err.index("Traceback") :].splitlines()
    frames = [line for line in traceback if line.lstrip().startswith("File ")]
    assert [frame.split(" in ")[1] for frame in frames] == ["<module>", "main"]
    assert "opt.step()" in traceback[traceback.index(frames[-1]) + 1]
    assert "GradientSpikeError" in err
    assert "head.weight" in err
    with history(here) as record:
        assert record.end is not None
        assert "GradientSpikeError" in str(record.end.error)


SEEN = """
    import json, sys
    main = sys.modules["__main__"]
    print(json.dumps({
        "argv": sys.argv, "path": sys.path[0], "name": __name__, "file": __file__,
        "package": __package__, "own": vars(main) is globals(), "spec": __spec__ and __spec__.name,
    }))
"""


@pytest.mark.parametrize("module", [False, True])
def test_the_script_sees_what_python_shows(here: Path, capsys: pytest.CaptureFixture[str], module: bool) -> None:
    write(here / "tools" / "__init__.py", "")
    write(here / "tools" / "seen.py", SEEN)
    target = "tools.seen" if module else "tools/seen.py"
    arguments = ["--lr", "0.1", "--", "-m", "x"]
    expected = python(*(["-m"] if module else []), target, *arguments, cwd=here)
    argv, path = sys.argv, list(sys.path)
    assert runner.run(target, arguments, module=module) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(expected.stdout)
    assert (sys.argv, sys.path) == (argv, path)


def test_what_is_wrong_is_said_before_the_script_starts(here: Path) -> None:
    script = write(here / "never.py", "raise AssertionError('the script was started')\n")
    write(here / "bad.toml", "[plugin.spike]\nratoi = 3\n")
    write(here / "flow.toml", "[flow]\nmode = 'gard'\n")
    write(here / "old" / "history.sqlite", "")
    write(here / "file", "")
    wrong: list[tuple[runner.Settings, type[DynguardError], str]] = [
        (runner.Settings(plugins=("spiek",)), PluginError, "spike"),
        (runner.Settings(mode="gard"), SetupError, "guard"),
        (runner.Settings(config=Path("bad.toml")), OptionError, "ratio"),
        (runner.Settings(config=Path("flow.toml")), SetupError, "guard"),
        (runner.Settings(config=Path("none.toml")), PluginError, "none.toml"),
        (runner.Settings(run_dir=Path("old")), RunDirectoryError, "already holds a run"),
        (runner.Settings(run_dir=Path("file")), RunDirectoryError, "file"),
    ]
    for settings, error, text in wrong:
        with pytest.raises(error, match=text):
            runner.run(script, settings=settings)


@pytest.mark.parametrize(
    ("target", "module"), [("gone.py", False), ("gone", True), ("empty", False), ("empty", True), ("empty.gone", True)]
)
def test_nothing_to_run(here: Path, target: str, module: bool) -> None:
    write(here / "empty" / "__init__.py", "")
    with pytest.raises(SetupError, match=r"gone|__main__"):
        runner.run(target, module=module)


def test_a_hook_on_import_runs_after_the_module_and_leaves_no_trace(here: Path) -> None:
    write(here / "late_module.py", "value = 1\n")
    before = list(sys.meta_path)
    sys.path.insert(0, str(here))
    seen: list[int] = []
    try:
        with runner.when_imported("late_module", lambda module: seen.append(module.value)):
            assert seen == []
            import late_module  # type: ignore[import-not-found]  # made above

            assert seen == [1]
        with runner.when_imported("never_imported_module", lambda module: seen.append(0)):
            pass
        with runner.when_imported("late_module", lambda module: seen.append(2)):
            assert seen == [1, 2]
        assert late_module.__spec__.loader.name == "late_module"
    finally:
        sys.path.remove(str(here))
        sys.modules.pop("late_module", None)
    assert sys.meta_path == before


def test_no_hook_stays_behind(here: Path) -> None:
    from torch.optim import optimizer as module

    before = dict(module._global_optimizer_pre_hooks)
    runner.run(write(here / "gan.py", TWO_OPTIMIZERS.replace("range(100)", "range(3)")))
    with pytest.raises(SetupError):
        runner.run("gone", module=True)
    assert dict(module._global_optimizer_pre_hooks) == before


def test_a_script_that_guards_itself_is_left_to_it(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = """
        import torch
        from dynguard import FlowManager
        model = torch.nn.Linear(2, 1)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        with FlowManager(model, opt, plugins=["spike"]) as flow:
            (model(torch.ones(1, 2)) * float("nan")).sum().backward()
            opt.step()
        assert [i.step for i in flow.interventions] == [0]
    """
    assert runner.run(write(here / "own.py", script)) == 0
    assert "already watched" in capsys.readouterr().err


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)


def test_owner_is_the_root_that_has_all() -> None:
    model, other = Branch(), Branch()
    optimizer = torch.optim.SGD(model.inner.parameters(), lr=0.1)
    assert globalhooks.owners(optimizer) is model
    wrapped = nn.DataParallel(model)
    assert globalhooks.owners(optimizer) is wrapped
    del other


def test_owners_are_as_few_as_possible_and_the_smallest_of_equals() -> None:
    small = nn.Linear(2, 2)
    large = nn.ModuleList([small, nn.Linear(3, 3)])
    roots = [large, small]
    weights = {id(p) for p in small.parameters()}
    assert globalhooks.cover(weights, roots) == [small]
    assert globalhooks.cover(weights | {id(p) for p in large.parameters()}, roots) == [large]
    assert globalhooks.cover({1}, roots) == []


def test_several_owners_are_named_by_their_variables() -> None:
    first = nn.Linear(2, 2)
    second = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    assert globalhooks.owners(optimizer) == {"first": first, "second": second}


class Outer(torch.optim.SGD):
    """An optimizer that steps another one over the same parameters, as SAM and Lookahead do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.base = torch.optim.SGD(parameters, lr=0.1)
        self.nested: list[bool] = []
        self.base.register_step_pre_hook(lambda opt, a, k: self.nested.append(globalhooks.is_inside_another(opt)))

    def step(self, closure: object = None) -> None:  # type: ignore[override]  # as such optimizers do
        self.base.step()


def test_a_step_inside_another_step_is_told_apart() -> None:
    weight = nn.Parameter(torch.ones(1))
    outer = Outer([weight])
    outer.step()
    outer.base.step()
    assert outer.nested == [True, False]
