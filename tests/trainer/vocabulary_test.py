"""A vocabulary with more ids than tokens: only tokens are sampled."""

import dataclasses
import json

import numpy as np
import pytest
from helpers import tiny_run

from jaxrl_llm import api, metrics
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.models.files import hf
from jaxrl_llm.trainer import loop

PADDING = 40
HOLES = (5, 6, 7)


@pytest.fixture(scope="module")
def padded(tmp_path_factory):
  """A model whose logits are highest for ids without a token."""
  folder = tmp_path_factory.mktemp("models") / "padded"
  config = tiny_run.model_config()
  size = config.vocab_size + len(HOLES) + PADDING
  tiny_run.write_model(folder, dataclasses.replace(config, vocab_size=size))
  file = folder / "tokenizer.json"
  tokenizer = json.loads(file.read_text())
  vocab = tokenizer["model"]["vocab"]
  for text, i in vocab.items():
    vocab[text] = i + len(HOLES) * (i >= HOLES[0])
  file.write_text(json.dumps(tokenizer))
  return folder


def unused(folder):
  size = hf.read_config(folder).vocab_size
  return (*HOLES, *range(size - PADDING, size))


def test_ids_without_a_token(padded, model):
  size = hf.read_config(padded).vocab_size
  assert Tokenizer(padded).unused(size) == unused(padded)
  run = tiny_run.make_run(padded)
  assert run.learner.policy.fns.config.unused == unused(padded)
  # Nothing changes for a vocabulary without padding.
  assert tiny_run.make_run(model).learner.policy.fns.config.unused == ()


@pytest.mark.parametrize(
  "changes",
  [
    {"sampler__exact": True, "loss__kl_coefficient": 0.1},
    {
      "sampler__drafter": "quantized_copy",
      "sampler__num_draft_tokens": 1,
      **tiny_run.EIGHT_DEVICES,
    },
  ],
)
def test_sampler_and_trainer_agree_on_them(padded, tmp_path, changes):
  settings = {"estimator__name": "group", "run__steps": 1}
  settings |= {"loss__entropy_coefficient": 0.01}
  run = tiny_run.make_run(padded, **settings | changes)
  _, _, collected = tiny_run.collect(run)
  rollout = collected.batch.responses.rollout
  tokens = rollout.tokens[rollout.mask]
  assert tokens.size > 100 and not np.isin(tokens, unused(padded)).any()
  assert loop.train(run, tmp_path) == 0
  start, row = metrics.read_rows(tmp_path / "metrics.jsonl")
  assert start["sampler_trainer/parity_error"] <= 1e-6
  most = np.log(tiny_run.model_config().vocab_size)
  assert row["sampler_trainer/logprob_diff_max"] <= 1e-5
  assert 0.9 * most < row["policy/entropy"] < most
  assert row["policy/grad_norm"] > 0 and row["policy/skipped"] == 0


def test_a_policy_generates_tokens_and_replaces_its_own_files(padded, tmp_path):
  policy = api.load(padded)
  (answers,) = policy.generate(["1+1="], samples=32, max_new_tokens=8)
  tokens = [i for answer in answers for i in answer["tokens"]]
  assert len(tokens) > 100 and not np.isin(tokens, unused(padded)).any()
  for _ in range(2):
    policy.save(tmp_path / "copy")
  assert hf.read_config(tmp_path / "copy") == hf.read_config(padded)
