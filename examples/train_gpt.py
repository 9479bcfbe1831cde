"""Train a small GPT on text, with a checkpoint at every step: kill it whenever you like.

    torchrun --nproc-per-node 2 --max-restarts 10 train_gpt.py [FILE ...]

Without files it learns the source of Python's standard library. torchrun restarts the job when a
rank dies; run it again when all of it was killed. For restarts set
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or ranks may look for the dead (pytorch issue 167288).
"""

import sys
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import everystep

run = "runs/gpt"  # the checkpoints; remove it to begin anew
steps = 300
vocabulary, context, batch, width, heads, layers = 256, 128, 16, 128, 4, 4
dropout, learning_rate, seed = 0.1, 1e-3, 0


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context))

    def forward(self, x):  # (B, T) tokens
        h = self.tokens(x) + self.places.weight  # (B, T, C)
        h = self.layers(h, mask=self.mask, is_causal=True)  # (B, T, C)
        return self.head(h)  # (B, T, V)


class Loader:
    """Random windows of the text. Its whole state is that of its generator."""

    def __init__(self, text, seed):
        self.text = text  # (bytes,) uint8
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self):
        last = len(self.text) - context - 1
        starts = torch.randint(last, (batch, 1), generator=self.generator)  # (B, 1)
        windows = self.text[starts + torch.arange(context + 1)].long()  # (B, T + 1)
        return windows[:, :-1], windows[:, 1:]  # (B, T) each: tokens, and what follows them

    def state_dict(self):
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])


dist.init_process_group("gloo")
rank = dist.get_rank()

paths = [Path(p) for p in sys.argv[1:]] or sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
text = torch.frombuffer(bytearray().join(p.read_bytes() for p in paths), dtype=torch.uint8)
loader = Loader(text, seed + rank)  # each rank reads windows of its own

torch.manual_seed(seed)
model = DistributedDataParallel(GPT())
torch.manual_seed(seed + rank)  # each rank drops other units
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)

extras = {"schedule": schedule, "loader": loader}
with everystep.Checkpointer(run, model=model, optimizer=optimizer, extras=extras) as ck:
    done = ck.restore()  # 0 on a fresh run; else how many steps are done, all as it was then
    for step in range(done, steps):
        x, y = loader.batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())  # (B T, V) against (B T,)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        ck.step(loss=loss.item())  # when it returns, the state after this step is on disk
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

dist.destroy_process_group()
