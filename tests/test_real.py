"""Tensors of a real model: what its own softmax returned, and its logits over the vocabulary."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cases import mismatch, reference

DATA = Path(__file__).parent / "data" / "minilm.npz"


@pytest.fixture(scope="module")
def minilm():
    with np.load(DATA) as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.parametrize("layer", [0, 5])
def test_attention_is_what_the_model_s_softmax_returned(route, minilm, layer):
    scores = torch.from_numpy(minilm[f"attention_scores_layer{layer}"])
    recorded = torch.from_numpy(minilm[f"attention_probs_layer{layer}"])
    y = route(scores)
    assert (y - recorded).abs().max() <= 1e-6
    padded = torch.from_numpy(minilm["attention_mask"] == 0)[:, None, None, :].expand_as(y)
    assert padded.any()
    assert (y[padded] == 0).all()


def test_attention_from_host_memory_through_a_gpu(copied_route, minilm):
    scores = torch.from_numpy(minilm["attention_scores_layer5"])
    assert (copied_route(scores) - torch.from_numpy(minilm["attention_probs_layer5"])).abs().max() <= 1e-6


def test_vocabulary_logits(route, minilm):
    logits = torch.from_numpy(minilm["vocab_logits"])
    assert logits.shape[1] * 4 % 16, "rows that aren't aligned are what makes it hard"
    for op in ("softmax", "log_softmax"):
        wrong = mismatch(route(logits, op=op), reference(logits, op=op), op)
        assert wrong is None, wrong


def test_vocabulary_logits_in_half(torch_route, minilm):
    for dtype in ("float16", "bfloat16"):
        x = torch_route.array(torch.from_numpy(minilm["vocab_logits"]), dtype)
        torch_route.verify(x)
        torch_route.verify(x, dtype="float32")


def test_the_mask_is_of_integers_and_refused(route, minilm):
    with pytest.raises(TypeError, match="int64"):
        route.run(route.kind.array(torch.from_numpy(minilm["attention_mask"])))
