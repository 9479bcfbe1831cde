"""A bad batch spikes the loss: go back to the step before it, leave the batch out, and go on.

    python loss_spike.py [RUN]

Every step is stored as what changed, so that any step can be had again. Afterwards `everystep ls
RUN` shows the spike on the timeline `main`, and what training made of it on the one that left it.
"""

import statistics
import sys

import torch
import torch.nn.functional as F
from torch import nn

import everystep

run = sys.argv[1] if len(sys.argv) > 1 else "runs/spike"
steps, batch, bad_batch = 120, 64, 70
skipped = set()  # batches to leave out; no part of the state, or going back would forget them


class Loader:
    """Points of a function to learn, batch after batch; the bad one has targets far off."""

    def __init__(self):
        self.next = 0

    def batch(self):
        while self.next in skipped:
            self.next += 1
        generator = torch.Generator().manual_seed(self.next)
        x = torch.rand(batch, 2, generator=generator) * 4 - 2  # (B, 2)
        y = torch.sin(x).sum(1, keepdim=True)  # (B, 1)
        if self.next == bad_batch:
            y = y * 100
        self.next += 1
        return x, y

    def state_dict(self):
        return {"next": self.next}

    def load_state_dict(self, state):
        self.next = state["next"]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = Loader()
losses = []  # of the newest steps

with everystep.Checkpointer(
    run,
    model=model,
    optimizer=optimizer,
    extras={"loader": loader},
    strategy=everystep.Deltas(full_every=50, batch=1),
) as ck:
    done = ck.restore()
    while done < steps:
        x, y = loader.batch()
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ck.step(loss=loss.item())
        done += 1
        if len(losses) == 20 and loss.item() > 10 * statistics.median(losses):
            print(f"step {done}: loss {loss.item():.3f}, a spike: batch {loader.next - 1} is bad")
            skipped.add(loader.next - 1)
            done = ck.restore(step=done - 1)  # weights, moments, loader: all as before the batch
            print(f"back at step {done}; batch {loader.next} is left out from now on")
            continue
        losses = [*losses[-19:], loss.item()]
        if done % 20 == 0:
            print(f"step {done}: loss {loss.item():.3f}")

print(f"done: everystep ls {run}")
