"""Parity with a real nanochat run, and files that are not what they seem."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from xsalab.eval.generate import generate
from xsalab.interop.nanochat import (
    VARIANT_FILE,
    NanochatTokenizer,
    latest_step,
    load_weights,
    read_checkpoint,
    read_encoding,
    variant_note,
)
from xsalab.model import GPT, ModelConfig, VariantChoice
from xsalab.optim import Hybrid, OptimConfig
from xsalab.optim.hybrid import GROUPS, Rates

Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def standard(nanochat_d4: Path) -> tuple[GPT, NanochatTokenizer]:
    return read_checkpoint(nanochat_d4)


@pytest.mark.parametrize("kernel", ["sdpa", "blocked", "explicit"])
@pytest.mark.parametrize("alpha", ["0", "0.5", "1"])
def test_logits_and_losses_are_nanochats(nanochat_d4: Path, expected: Arrays, alpha: str, kernel: str) -> None:
    model, _ = read_checkpoint(nanochat_d4, choice=VariantChoice("xsa", options={"alpha": float(alpha)}))
    model.kernel = kernel
    tokens = torch.from_numpy(expected["tokens"])
    with torch.no_grad():
        logits = model(tokens)[:, expected["positions"]]
        losses = model.token_nats(tokens[:, :-1], tokens[:, 1:])
    # asked for: 2e-4; sums in another order were measured to move the logits by 3e-6
    torch.testing.assert_close(logits, torch.from_numpy(expected[f"logits_alpha_{alpha}"]), atol=2e-5, rtol=0)
    torch.testing.assert_close(losses, torch.from_numpy(expected[f"loss_alpha_{alpha}"]), atol=2e-5, rtol=0)


@pytest.mark.parametrize(
    ("content", "alpha", "note"),
    [
        ({"steps": {"120": [0.5, 0.5, 0.5, 0.5]}}, "0.5", "XSA α = 0.5 as "),
        ({"alpha": 1, "steps": {"100": [0, 0, 0, 0]}}, "1", "XSA α = 1 as "),
        ({"steps": {"120": [0, 0, 0, 0]}}, "0", "standard attention, XSA α = 0 as "),
        ({"steps": {"100": [1, 1, 1, 1]}}, "0", f"standard attention, as {VARIANT_FILE} does not name step 120"),
        (None, "0", f"standard attention, as no {VARIANT_FILE} lies beside it"),
    ],
    ids=["launcher", "by-hand", "zero", "another-step", "none"],
)
def test_the_file_beside_it_says_the_strength(
    nanochat_d4: Path, expected: Arrays, tmp_path: Path, content: object, alpha: str, note: str
) -> None:
    """nanochat's own files do not: the same weights are another model with exclusion. A choice that is given wins."""
    folder = Path(shutil.copytree(nanochat_d4, tmp_path / "run"))
    if content is not None:
        (folder / VARIANT_FILE).write_text(json.dumps(content), encoding="utf-8")
    model, _ = read_checkpoint(folder)
    chosen, _ = read_checkpoint(folder, choice=VariantChoice("xsa", options={"alpha": 0.5}))
    tokens = torch.from_numpy(expected["tokens"])
    for each, strength in ((model, alpha), (chosen, "0.5")):
        with torch.no_grad():
            logits = each(tokens)[:, expected["positions"]]
        torch.testing.assert_close(logits, torch.from_numpy(expected[f"logits_alpha_{strength}"]), atol=2e-5, rtol=0)
    assert variant_note(folder).startswith(note)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a JSON file"),
        ("[1]", "not understood"),
        ('{"alphas": 1}', "not understood"),
        ('{"alpha": true}', "alpha = True: must be a number in"),
        ('{"alpha": [1, 2, 1, 1]}', "alpha = 2: must be a number in"),
        ('{"alpha": {"from": 0, "to": 1}}', "must be a number in"),
        ('{"alpha": []}', "must be a number in"),
        ('{"alpha": NaN}', "alpha = nan: must be a number in"),
        ('{"alpha": [1, 1, 1]}', "4"),
    ],
)
def test_a_broken_file_of_strengths_is_named(nanochat_d4: Path, tmp_path: Path, text: str, message: str) -> None:
    folder = Path(shutil.copytree(nanochat_d4, tmp_path / "run"))
    (folder / VARIANT_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"xsalab_variant\.json: .*{message}"):
        read_checkpoint(folder)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_greedy_continuation_is_nanochats(
    standard: tuple[GPT, NanochatTokenizer], expected: Arrays, cache: bool
) -> None:
    prompt = expected["greedy_prompt"].tolist()
    new = list(generate(standard[0], prompt, 48, temperature=0, cache=cache))
    assert prompt + new == expected["greedy_tokens"].tolist()


def test_prefill_and_decode_give_nanochats_logits(nanochat_d4: Path, expected: Arrays) -> None:
    """F003, F011: chunks through the cache, beyond the short window of 128, with XSA."""
    from xsalab.model import KVCache

    model, _ = read_checkpoint(nanochat_d4, choice=VariantChoice("xsa"))
    tokens, cache = torch.from_numpy(expected["tokens"]), KVCache(model.config.depth)
    with torch.no_grad():
        parts = [model(part, cache) for part in tokens.split([7, 1, 130, 3, 200, 59], dim=1)]
    logits = torch.cat(parts, dim=1)[:, expected["positions"]]
    torch.testing.assert_close(logits, torch.from_numpy(expected["logits_alpha_1"]), atol=2e-5, rtol=0)


# --- the tokenizer


def test_bytes_per_token_are_nanochats(nanochat_d4: Path, standard: tuple[GPT, NanochatTokenizer]) -> None:
    theirs = torch.load(nanochat_d4 / "token_bytes.pt", weights_only=True).numpy()
    assert (standard[1].bytes_per_token() == theirs).all()


def test_encoding_gives_back_the_tokens_that_nanochat_trained_on(
    standard: tuple[GPT, NanochatTokenizer], expected: Arrays
) -> None:
    tokenizer, ids = standard[1], expected["tokens"][0].tolist()
    assert ids[0] == tokenizer.bos
    text = tokenizer.decode(ids[1:])
    documents = text.split("<|bos|>")
    again = tokenizer.encode(documents)
    rebuilt = [tokenizer.bos] + [i for n, doc in enumerate(again) for i in ([tokenizer.bos] if n else []) + doc]
    assert rebuilt[:-3] == ids[:-3]  # the last tokens were cut out of a longer text


@pytest.mark.parametrize("text", ["", "naïve café 🦀 1234567", "<|bos|> is text", " \n\n  x\ty\r\n", "don't WE'LL"])
def test_text_comes_back_and_bytes_add_up(standard: tuple[GPT, NanochatTokenizer], text: str) -> None:
    """F069, F070: bytes per token sum to the length in UTF-8, also within a character."""
    tokenizer = standard[1]
    (ids,) = tokenizer.encode([text])
    assert tokenizer.decode(ids) == text
    assert tokenizer.bytes_per_token()[ids].sum() == len(text.encode())
    assert tokenizer.bos not in ids


# --- hostile and broken files


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_hostile_tokenizer_is_refused_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    """F102: a tokenizer file that creates a marker file when unpickled."""
    marker, path = tmp_path / "marker", tmp_path / "tokenizer.pkl"
    data = pickle.dumps({"mergeable_ranks": Hostile(marker)}, protocol=protocol)
    pickle.loads(data)
    assert marker.exists(), "the file is not hostile"
    marker.unlink()
    path.write_bytes(data)
    with pytest.raises(
        ValueError, match=r"tokenizer\.pkl: not a pickled tiktoken Encoding; nothing in it was executed"
    ):
        NanochatTokenizer.read(path)
    assert not marker.exists()


def test_a_hostile_state_inside_an_encoding_is_refused(tmp_path: Path, nanochat_d4: Path) -> None:
    """F102: the right class in front does not let another one in."""
    data = (nanochat_d4 / "tokenizer.pkl").read_bytes()
    hostile = data[:-1] + pickle.dumps(Hostile(tmp_path / "marker"), protocol=4)[2:]
    with pytest.raises(ValueError, match="asks for"):
        read_encoding(hostile)
    assert not (tmp_path / "marker").exists()


def test_hostile_weights_are_refused_and_nothing_runs(tmp_path: Path, nanochat_d4: Path) -> None:
    """F102: the same for the checkpoint."""
    marker = tmp_path / "marker"
    shutil.copy(nanochat_d4 / "meta_000120.json", tmp_path)
    torch.save({"resid_lambdas": Hostile(marker)}, tmp_path / "model_000120.pt")
    with pytest.raises(ValueError, match=r"model_000120\.pt: not a file of tensors alone"):
        read_checkpoint(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("data", [b"", b"not a pickle", b"\x80\x04.", b"\x80\x04}.", b"\x80\x04u."], ids=repr)
def test_what_is_no_encoding_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        read_encoding(data)


@pytest.fixture
def tensors(nanochat_d4: Path) -> dict[str, torch.Tensor]:
    return dict(torch.load(nanochat_d4 / "model_000120.pt", weights_only=True))


def empty_model() -> GPT:
    return GPT(ModelConfig(depth=4, width=128, heads=4, context=512, vocab_size=2048))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(extra=torch.zeros(1)), "tensor extra .* has no place"),
        (lambda t: t.pop("lm_head.weight"), "no tensor for head.weight"),
        (lambda t: t.update(x0_lambdas=torch.zeros(5)), r"tensor x0_lambdas is \(5,\), the model's x0 \(4,\)"),
        (lambda t: t.update({"_orig_mod.x0_lambdas": torch.zeros(4)}), "tensor _orig_mod.x0_lambdas is there twice"),
        (lambda t: t.update({"transformer.h.4.attn.c_q.weight": torch.zeros(128, 128)}), "has no place"),
    ],
    ids=["left-over", "missing", "shape", "twice", "fifth-layer"],
)
def test_every_tensor_is_used_exactly_once(tensors: dict[str, torch.Tensor], change, message: str) -> None:
    change(tensors)
    with pytest.raises(ValueError, match=message):
        load_weights(empty_model(), tensors, "model.pt")


def test_every_parameter_is_filled(tensors: dict[str, torch.Tensor]) -> None:
    """F047: no parameter keeps what was in memory."""
    model = empty_model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    load_weights(model, {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}, "model.pt")
    assert not [name for name, parameter in model.named_parameters() if parameter.isnan().any()]


def test_the_newest_complete_step_is_taken(tmp_path: Path) -> None:
    """F095, F096: numeric order, complete sets alone, stray files ignored."""
    for name in ("model_999999.pt", "meta_999999.json", "model_1000000.pt", "meta_1000000.json", "model_1000001.pt"):
        (tmp_path / name).touch()
    for name in ("model_x.pt", "model_2000000.pt.tmp", "meta_2000000.json", "notes.txt"):
        (tmp_path / name).touch()
    assert latest_step(tmp_path) == 1_000_000


def test_a_folder_without_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no nanochat checkpoint"):
        read_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="no such folder"):
        read_checkpoint(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ("{", "not the meta file"),
        ("[]", "not the meta file"),
        ("{}", "model_config"),
        (json.dumps({"model_config": {"n_layers": 4}}), "'n_layers'"),
        (json.dumps({"model_config": {"n_embd": 130, "n_head": 4}}), "not divisible"),
    ],
    ids=["no-json", "no-table", "no-config", "unknown-field", "bad-width"],
)
def test_a_broken_meta_file_is_named(tmp_path: Path, meta: str, message: str) -> None:
    (tmp_path / "model_000001.pt").touch()
    (tmp_path / "meta_000001.json").write_text(meta, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"meta_000001\.json: .*{message}"):
        read_checkpoint(tmp_path)


# --- the optimizer


class Matrices(nn.Module):
    """Parameters under names that put them into the groups that are asked for."""

    def __init__(self, matrices: np.ndarray | None = None, head: np.ndarray | None = None) -> None:
        super().__init__()
        if matrices is not None:
            self.blocks = nn.ParameterList(torch.from_numpy(matrix.copy()) for matrix in matrices)
        if head is not None:
            self.head = nn.Parameter(torch.from_numpy(head.copy()))


def follow(model: Matrices, optimizer: Hybrid, gradients: np.ndarray, expected: np.ndarray) -> None:
    parameters = list(model.parameters())
    for step, gradient in enumerate(gradients):
        for parameter, each in zip(parameters, gradient, strict=True):
            parameter.grad = torch.from_numpy(each.copy())
        optimizer.step()
        for parameter, want in zip(parameters, torch.from_numpy(expected[step + 1]), strict=True):
            moved = (want - torch.from_numpy(expected[step][0])).norm()
            assert moved > 1e-3, "the reference does not move"
            assert (parameter.detach() - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("shape", ["square", "tall", "wide"])
def test_hybrid_gives_nanochats_muon(nanochat_d4: Path, shape: str) -> None:
    with np.load(nanochat_d4 / "optimizer.npz") as arrays:
        states, gradients = arrays[f"muon_{shape}_params"], arrays[f"muon_{shape}_grads"]
    model = Matrices(matrices=states[0])
    optimizer = Hybrid(model, OptimConfig(), Rates(dict.fromkeys(GROUPS, 0.02), matrix_weight_decay=0.1))
    assert optimizer.param_groups[0]["momentum"] == 0.95
    follow(model, optimizer, gradients, states)


def test_hybrid_gives_nanochats_adamw(nanochat_d4: Path) -> None:
    with np.load(nanochat_d4 / "optimizer.npz") as arrays:
        states, gradients = arrays["adamw_params"], arrays["adamw_grads"]
    model = Matrices(head=states[0])  # the head's group has these betas and this decay
    optimizer = Hybrid(model, OptimConfig(), Rates(dict.fromkeys(GROUPS, 0.01), matrix_weight_decay=0.0))
    follow(model, optimizer, gradients[:, None], states[:, None])


def test_the_schedule_is_that_of_nanochats_console(nanochat_d4: Path) -> None:
    """The factor on the rates that a real run of 60 steps printed at each step, with two digits."""
    text = (nanochat_d4 / "console.log").read_text(encoding="utf-8")
    printed = {int(step): float(factor) for step, factor in re.findall(r"step (\d+)/00060 .*? lrm: ([\d.]+)", text)}
    assert sorted(printed) == list(range(60))
    schedule = OptimConfig(warmup_steps=10).schedule_over(60)
    assert printed == pytest.approx({step: schedule.lr(step) for step in range(60)}, abs=0.00501)
