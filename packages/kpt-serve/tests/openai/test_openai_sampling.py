from types import SimpleNamespace

import pytest
import torch

from kpt_serve.openai.requests import Asked

pytestmark = pytest.mark.filterwarnings("ignore")  # of what transformers imports


@pytest.fixture
def sample():
    from transformers import GenerationConfig

    from kpt_serve.openai.batching import Sampling

    def run(scores, *rows, **defaults):
        sampling = Sampling(GenerationConfig(**defaults))
        told = [sampling.settings(Asked("", *row, None)) for row in rows]
        requests = [SimpleNamespace(has_new_token=True, state=SimpleNamespace(logit_processor_kwargs=t)) for t in told]
        storage = torch.zeros(2, len(rows), dtype=torch.int32)
        return sampling(None, scores.expand(len(rows), -1), sampling.prepare_tensor_args(requests, storage))

    torch.manual_seed(0)
    return run


def shares(found):
    return found.argmax(-1).bincount(minlength=found.shape[-1]) / len(found)


SCORES = torch.tensor([2.0, 1.0, 0.0, -1.0])


def test_a_request_has_its_own_temperature(sample):
    rows = [(0.0, None), (1.0, None), (2.0, None)] * 4000
    found = sample(SCORES, *rows)
    assert torch.equal(found[::3], SCORES.expand(4000, -1))
    for first, temperature in ((1, 1), (2, 2)):
        torch.testing.assert_close(shares(found[first::3]), (SCORES / temperature).softmax(-1), atol=0.03, rtol=0)


def test_a_request_has_its_own_nucleus(sample):
    found = sample(SCORES, *[(1.0, 0.7), (1.0, 1.0), (0.0, 0.7)] * 4000)
    want = torch.tensor([*SCORES[:2].softmax(-1).tolist(), 0, 0])  # 0.64 and 0.24
    torch.testing.assert_close(shares(found[::3]), want, atol=0.03, rtol=0)
    torch.testing.assert_close(shares(found[1::3]), SCORES.softmax(-1), atol=0.03, rtol=0)
    assert torch.equal(found[2::3], SCORES.expand(4000, -1))


def test_what_a_batch_does_not_apply_is_told(sample, caplog):
    sample(SCORES, (0.0, None), repetition_penalty=1.05)
    assert "repetition_penalty=1.05 of the model's generation config is not applied" in caplog.text


def test_the_model_says_what_a_request_does_not(sample):
    assert torch.equal(sample(SCORES, (None, None)), SCORES[None])
    found = sample(SCORES, *[(None, None)] * 4000, do_sample=True, temperature=0.5, top_k=2)
    want = torch.tensor([*(SCORES[:2] * 2).softmax(-1).tolist(), 0, 0])
    torch.testing.assert_close(shares(found), want, atol=0.03, rtol=0)


def test_the_smallest_temperature_is_nearly_greedy(sample):
    found = sample(torch.tensor([1.0, 2.0, 0.0, -1.0]), *[(1e-40, None), (1e-38, 0.9), (1e-6, None)] * 20)
    assert set(found.argmax(-1).tolist()) == {1}
