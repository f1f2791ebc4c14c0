"""A stand-in for a nanochat checkout: its module names, the calls between them and its loop, with tiny insides.

Parts that are relied on are those of karpathy/nanochat 92d63d4: one object for attention with two functions, a layer
that knows its number, weights made in ``init_weights``, a fixed seed in ``compute_init``, a loop that divides the loss
by the number of micro-batches and evaluates before the update.
"""

from __future__ import annotations

from pathlib import Path

FILES = {
    "nanochat/__init__.py": "",
    "nanochat/common.py": """
import os
import torch
COMPUTE_DTYPE = getattr(torch, os.environ.get("NANOCHAT_DTYPE", "float32"))
def compute_init(device_type):
    torch.manual_seed(42)
    return False, 0, 0, 1, torch.device(device_type)
""",
    "nanochat/flash_attention.py": """
from types import SimpleNamespace
def plain(q, k, v):
    before = v.cumsum(1) / (1 + v[0, :, 0, 0].new_ones(v.shape[1]).cumsum(0).view(-1, 1, 1))
    return q + before.repeat_interleave(q.shape[2] // v.shape[2], 2)
flash_attn = SimpleNamespace(
    flash_attn_func=lambda q, k, v, causal=False, window_size=(-1, -1): plain(q, k, v),
    flash_attn_with_kvcache=lambda q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False,
        window_size=(-1, -1): plain(q, k, v),
)
""",
    "nanochat/gpt.py": """
from dataclasses import dataclass
import torch
from torch import nn
from nanochat.flash_attention import flash_attn
@dataclass
class GPTConfig:
    sequence_len: int = 16
    vocab_size: int = 40
    n_layer: int = 3
    n_head: int = 4
    n_kv_head: int = 2
    n_embd: int = 32
    window_pattern: str = "SSSL"
class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx, self.shape = layer_idx, (config.n_kv_head, config.n_embd // config.n_head)
        self.c_q = nn.Linear(config.n_embd, config.n_embd)
        self.c_v = nn.Linear(config.n_embd, self.shape[0] * self.shape[1])
    def forward(self, x, ve, cos_sin, window_size, kv_cache):
        q = self.c_q(x).unflatten(-1, (-1, self.shape[1]))
        v = self.c_v(x).unflatten(-1, self.shape)
        k = v
        if kv_cache is None:
            y = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=window_size)
        else:
            y = flash_attn.flash_attn_with_kvcache(
                q, *kv_cache, k=k, v=v, cache_seqlens=None, causal=True, window_size=window_size)
        self.seen = q, k, v, y
        return y.flatten(2)
class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
    def forward(self, x, kv_cache):
        return x + self.attn(x, None, None, (16, 0), kv_cache)
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            "h": nn.ModuleList([Block(config, layer) for layer in range(config.n_layer)]),
        })
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
    @torch.no_grad()
    def init_weights(self):
        for parameter in self.parameters():
            parameter.normal_(0, 0.3)
    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        x = self.transformer.wte(idx)
        for block in self.transformer.h:
            x = block(x, kv_cache)
        logits = self.lm_head(x)
        if targets is None:
            return logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction=loss_reduction)
""",
    "nanochat/loss_eval.py": """
import torch
@torch.no_grad()
def evaluate_bpb(model, batches, steps, token_bytes):
    model(*next(iter(batches)), loss_reduction="none")
    q, k, v, y = model.transformer.h[-1].attn.seen
    return (y.unflatten(2, (v.shape[2], -1)) * v.unsqueeze(3)).sum(-1).abs().max().item()
""",
    "nanochat/checkpoint_manager.py": """
import json
import os
import torch
def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    os.makedirs(checkpoint_dir, exist_ok=True)
    torch.save(model_data, os.path.join(checkpoint_dir, f"model_{step:06d}.pt"))
    with open(os.path.join(checkpoint_dir, f"meta_{step:06d}.json"), "w", encoding="utf-8") as file:
        json.dump(meta_data, file)
def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0):
    if not checkpoint_dir:
        return {}, {}, {"step": step}
    with open(os.path.join(checkpoint_dir, f"meta_{step:06d}.json"), encoding="utf-8") as file:
        return {}, {}, json.load(file)
""",
    "scripts/base_eval.py": """
from nanochat.loss_eval import evaluate_bpb
def evaluate_core(model, tokenizer, device, max_per_task=-1):
    return {"results": {"copa": 0.55}, "centered_results": {"copa": 0.1}, "core_metric": 0.1}
""",
    "scripts/base_train.py": """
import argparse
from dataclasses import asdict
import torch
import wandb
from nanochat.gpt import GPT, GPTConfig
from nanochat.common import compute_init
from nanochat.checkpoint_manager import save_checkpoint, load_checkpoint
from nanochat.loss_eval import evaluate_bpb
from scripts.base_eval import evaluate_core
parser = argparse.ArgumentParser()
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--num-iterations", type=int, default=20)
parser.add_argument("--resume-from-step", type=int, default=-1)
parser.add_argument("--checkpoints", default="")
args, _ = parser.parse_known_args()
assert __name__ == "__main__"
_, _, _, _, device = compute_init("cpu")
model = GPT(GPTConfig(n_layer=args.depth))
model.init_weights()
step = 0
if args.resume_from_step != -1:
    _, _, meta = load_checkpoint(args.checkpoints, args.resume_from_step, device, load_optimizer=True)
    step = meta["step"]
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.Generator().manual_seed(1)
def batch(words):
    x = torch.randint(0, words, (2, 9), generator=data)
    return x[:, :-1], x[:, 1:]
while True:
    last_step = step == args.num_iterations
    if step % 2 == 0:
        print("bpb", step, evaluate_bpb(model, [batch(40)], 1, None), flush=True)
    if last_step:
        evaluate_core(model, None, device)
        if args.checkpoints:
            meta = {"step": step, "model_config": asdict(model.config)}
            save_checkpoint(args.checkpoints, step, model.state_dict(), None, meta, rank=0)
        break
    for words in (2, 40):  # micro-batches with very different losses
        x, y = batch(words)
        loss = model(x, y)
        print("micro", step, loss.item())
        loss = loss / 2
        loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=True)
    step += 1
""",
}


def write_standin(folder: Path) -> Path:
    """Writes it; the folder."""
    for name, text in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return folder
