"""Four lines guard a plain PyTorch loop: a broken sample and a batch on the wrong scale do no harm.

Run it: python examples/quickstart.py
"""

import torch
from torch import nn

import dynguard  # 1

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
flow = dynguard.FlowManager(model, optimizer)  # 2

for step in range(200):
    x = torch.randn(32, 20)
    y = x.sum(dim=1, keepdim=True)
    if step == 120:
        x[3, 7] = float("nan")  # a broken sample
    if step == 160:
        y *= 1000.0  # a batch on the wrong scale
    loss = nn.functional.mse_loss(model(x), y)
    flow.observe(loss=loss, batch=x)  # 3
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()

flow.close()  # 4

for finding in flow.findings:
    print(f"step {finding.step}: {finding.kind} in {finding.subject or 'the loss'}")
for done in flow.interventions:
    print(f"step {done.step}: {done.action}")
print("all weights are finite:", all(bool(parameter.isfinite().all()) for parameter in model.parameters()))
