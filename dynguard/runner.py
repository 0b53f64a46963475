"""What ``dynguard run`` does: runs a training script as python would and guards every optimizer that takes a step."""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.util
import os
import runpy
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from dynguard.errors import SetupError, TrainingStopped

OPTIMIZERS = "torch.optim.optimizer"
WRAPPERS = (OPTIMIZERS, "torch._compile", "torch._dynamo.eval_frame")
HERE = str(Path(__file__).parent) + os.sep


@dataclass(frozen=True, slots=True)
class Settings:
    """How to guard: ``--plugins``, ``--run-dir``, ``--mode`` and ``--config``; None where nothing was said."""

    plugins: tuple[str, ...] | None = None
    run_dir: Path | None = None
    mode: str | None = None
    config: Path | None = None

    def check(self) -> None:
        """Find what is wrong before the script starts, as nothing is lost then.

        Raises:
            PluginError: an unknown plugin or option, or a configuration that can't be read.
            SetupError: an unknown mode.
            RunDirectoryError: the run directory can't be made or written to, or holds a run.
        """
        from dynguard import registry, settings
        from dynguard.history import create_run_directory

        config = registry.load_config(self.config)
        settings.Settings.make({} if self.mode is None else {"mode": self.mode}, config)
        wanted = self.plugins if self.plugins is not None else config.plugins
        registry.resolve("default" if wanted is None else wanted, config.options)
        if self.run_dir is not None:
            create_run_directory(self.run_dir, resume=False)

    def keywords(self) -> dict[str, Any]:
        """The keywords for FlowManager, without those that were not given."""
        from dynguard import registry

        # Found here and now: the script may change the working directory, and --plugins must not hide the options.
        config = registry.load_config(self.config).path
        given = {
            "plugins": self.plugins,
            "run_dir": self.run_dir and self.run_dir.absolute(),
            "mode": self.mode,
            "config": config and config.absolute(),
        }
        return {name: value for name, value in given.items() if value is not None}


def run(target: str, arguments: Sequence[str] = (), *, module: bool = False, settings: Settings | None = None) -> int:
    """Run a script, or a module as ``python -m`` does, under guard, and return its exit code.

    Args:
        target: path of the script (or of a directory or zip with a ``__main__.py``), or the module's name.
        arguments: what the script sees as ``sys.argv[1:]``.
        module: whether ``target`` is a module.
        settings: how to guard.

    Returns:
        The code that python would exit with: 1 after an uncaught exception, 130 after Ctrl-C. The script's traceback
        and one line about the run's report have been written to stderr.

    Raises:
        DynguardError: the target, the plugins, the configuration or the run directory is wrong; nothing has run.
    """
    settings = settings or Settings()
    if not module and not Path(target).exists():
        raise SetupError(f"no script at {target}")
    settings.check()
    watch = _Watch(settings.keywords())
    try:
        with when_imported(OPTIMIZERS, watch.install), _started_by_python(target, arguments, module):
            error = _execute(target, module)
    finally:
        watch.remove()
    line = watch.close(error)
    code = _exit_code(error)
    print(line, file=sys.stderr)
    return code


class _Watch:
    """Hooks all optimizers once torch has them. Nothing else is imported or made before one takes its first step."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.keywords = keywords
        self.home = Path.cwd()
        self.handles: list[Any] = []
        self.watcher: Any = None

    def install(self, optimizers: types.ModuleType) -> None:
        self.handles.append(optimizers.register_optimizer_step_pre_hook(self.before_step))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.watcher is None:
            from dynguard.torch.globalhooks import Watcher

            self.watcher = Watcher(self.keywords, self.home)
        self.watcher.before_step(optimizer)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def close(self, error: BaseException | None) -> str:
        """End the watch and say in a line what came of it."""
        if self.watcher is not None:
            return f"dynguard: {self.watcher.close(error)}"
        why = "no optimizer of torch took a step" if self.handles else "the script did not import torch"
        return f"dynguard: nothing was watched, as {why}"


@contextlib.contextmanager
def when_imported(name: str, then: Callable[[types.ModuleType], None]) -> Iterator[None]:
    """Call ``then`` with the module ``name`` as soon as it is imported: at once where it is already, else later."""
    if name in sys.modules:
        then(sys.modules[name])
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.remove()


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find one module and runs a callback when it has been executed."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self.name = name
        self.then = then

    def remove(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            self.then(module)

        loader.exec_module = exec_module  # on this one loader only; it stays the loader that the module tells of


@contextlib.contextmanager
def _started_by_python(target: str, arguments: Sequence[str], module: bool) -> Iterator[None]:
    """Give the script the sys.argv and sys.path that python would give it."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [target, *arguments]
    if not sys.flags.safe_path:  # else python has put no folder in front
        sys.path[0] = os.getcwd() if module else os.path.dirname(os.path.realpath(target))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _execute(target: str, module: bool) -> BaseException | None:
    """Run it and return what it ended with; SetupError where there was nothing to run."""
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif target.endswith(".pyc") or not os.path.isfile(target) or zipfile.is_zipfile(target):
            runpy.run_path(target, run_name="__main__")
        else:
            _run_source(os.path.abspath(target))
    except BaseException as error:  # noqa: BLE001 - SystemExit and KeyboardInterrupt are ways for a script to end
        error.__traceback__ = own_traceback(error)
        if isinstance(error, ImportError) and error.__traceback__ is None:
            raise SetupError(str(error)) from None  # runpy itself: no such module, no __main__ in it
        return error
    return None


def _run_source(path: str) -> None:
    """Run a source file as ``__main__``, as python does: runpy would make sys.argv[0] and __file__ the same."""
    loader = SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__ = path, loader
    main.__dict__["__builtins__"] = builtins
    before, sys.modules["__main__"] = sys.modules["__main__"], main
    try:
        exec(loader.source_to_code(loader.get_data(path), path), main.__dict__)
    finally:
        sys.modules["__main__"] = before


def own_traceback(error: BaseException) -> types.TracebackType | None:
    """The part of an exception's traceback that belongs to the script: without runpy's and our frames."""
    frames: list[types.TracebackType] = []
    link = error.__traceback__
    while link is not None:
        frames.append(link)
        link = link.tb_next
    while frames and _is_starter(frames[0]):
        del frames[0]
    hidden = _hidden_when_stopped if isinstance(error, TrainingStopped) else _is_ours
    if frames and (isinstance(error, TrainingStopped) or not _is_ours(frames[-1])):
        frames = [frame for frame in frames if not hidden(frame)]
    rebuilt: types.TracebackType | None = None
    for frame in reversed(frames):
        rebuilt = types.TracebackType(rebuilt, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return rebuilt


def _is_ours(frame: types.TracebackType) -> bool:
    return frame.tb_frame.f_code.co_filename.startswith(HERE)


def _is_starter(frame: types.TracebackType) -> bool:
    file = frame.tb_frame.f_code.co_filename
    return file.startswith((HERE, "<frozen runpy>", "<frozen importlib.")) or file == runpy.__file__


def _hidden_when_stopped(frame: types.TracebackType) -> bool:
    """A stop is shown at the script's ``optimizer.step()``, not in the wrappers that torch puts around it."""
    return _is_ours(frame) or frame.tb_frame.f_globals.get("__name__") in WRAPPERS


def _exit_code(error: BaseException | None) -> int:
    """What python would exit with, having written to stderr what python would write."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)  # the script may have set its own
    return 130 if isinstance(error, KeyboardInterrupt) else 1
