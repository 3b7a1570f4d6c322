"""On-policy distillation: advantages, teachers, and complete runs."""

import dataclasses
import json
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import chat_model, recipes, tiny, tiny_experts, tiny_run
from helpers.registries import registries  # noqa: F401

from jaxrl_llm import metrics, models, register
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods import distill
from jaxrl_llm.trainer import build, loop


@pytest.fixture(scope="module")
def teacher(model, tmp_path_factory):
  """Another model with the same tokenizer."""
  folder = tmp_path_factory.mktemp("teacher") / "tiny"
  fns, params = models.load(str(model))
  wide = tiny.widen(params, jax.random.key(5))
  models.save(str(folder), fns, wide, tokenizer_from=str(model))
  return folder


def make_run(model, teachers, **changes):
  settings = {"method__distill__teachers": str(teachers)}
  config = recipes.make_config("distill", model, **settings | changes)
  return build.make_run(config)


def measured(run):
  """Returns states and responses of the first step, and its scored batch."""
  states, responses = recipes.collect(run)
  rng = np.random.default_rng(0)
  batch = run.learner.measure(states.learner, "policy", responses, rng)
  return states, responses, batch


def of_columns(folder, model, columns):
  """Returns settings for questions with the given columns."""
  file = folder / "questions.jsonl"
  rows = [
    {"question": f"{i + 1}+2?", "answer": f"{i + 3}", **column}
    for i, column in enumerate(columns)
  ]
  file.write_text("\n".join(map(json.dumps, rows)))
  data = {"data__settings": {}, "data__source": "jsonl", "data__holdout": 0.0}
  return data | {"data__path": str(file)}


class TestAdvantages:
  @pytest.mark.usefixtures("registries")
  def test_update_is_the_policy_gradient_of_the_reverse_kl(
    self, model, teacher
  ):
    register.optimizer("sgd", recipes.sgd)
    run = make_run(model, teacher, **recipes.SGD)
    states, responses = recipes.collect(run)
    mask, rollout = responses.rollout.mask, responses.rollout
    fns, theirs = models.load(str(teacher))
    policy = models.merge(states.learner.params("policy"))
    old, other = (
      np.asarray(recipes.logprobs(fns, params, rollout))
      for params in (policy, theirs)
    )
    assert np.abs(other - old)[mask].mean() > 0.1
    mean = lambda x: jnp.sum(jnp.where(mask, x, 0)) / mask.sum()
    # The ratio has the value 1 and the gradient of log π.
    ratio = lambda logprobs: jnp.exp(logprobs - old)
    row = recipes.check_first_update(
      run, states, responses, lambda x: -mean(ratio(x) * (other - old))
    )
    np.testing.assert_allclose(
      row["advantage/mean"], mean(other - old), atol=1e-6
    )

  def test_the_policy_itself_teaches_nothing(self, model):
    run = make_run(model, model)
    states, responses, batch = measured(run)
    assert batch.experience["policy_mask"].any()
    np.testing.assert_array_equal(batch.experience["advantages"], 0.0)
    before = jax.device_get(states.learner.policy.trained)
    after, row = run.learner.update(
      states.learner, responses, metrics.PhaseTimer()
    )
    assert row["advantage/mean"] == row["advantage/std"] == 0
    assert row["policy/grad_norm"] == 0
    after = jax.device_get(after.policy.trained)
    jax.tree.map(np.testing.assert_array_equal, after, before)

  @pytest.mark.parametrize(
    "changes",
    [
      {"family": "mistral", "extra": (("sliding_window", 3),)},
      # A capacity is for training; a teacher drops no tokens.
      vars(tiny_experts.CONFIG),
    ],
  )
  def test_a_teacher_scores_as_it_does_alone(self, model, tmp_path, changes):
    sizes = {"vocab_size": tiny_run.model_config().vocab_size}
    config = dataclasses.replace(tiny_run.model_config(), **changes | sizes)
    fns = models.make_policy(config)
    theirs = tiny.widen(fns.init(jax.random.key(0)), jax.random.key(5))
    models.save(str(tmp_path), fns, theirs, tokenizer_from=str(model))
    settings = {"data__group_size": 4, "optimizer__max_tokens_per_row": 64}
    run = make_run(model, tmp_path, model__expert_capacity=0.5, **settings)
    states, responses, batch = measured(run)
    other = recipes.logprobs(fns, theirs, responses.rollout)
    expected = other - batch.scores["old_logprobs"]
    np.testing.assert_allclose(
      batch.experience["advantages"],
      np.where(responses.rollout.mask, expected, 0),
      atol=2e-5,
    )

  def test_a_column_chooses_the_teacher(self, model, teacher, tmp_path):
    columns = [{"teacher": i % 2} for i in range(8)]
    settings = of_columns(tmp_path, model, columns)
    run = make_run(model, f"{model},{teacher}", **settings)
    states, responses, batch = measured(run)
    rollout, mask = responses.rollout, responses.rollout.mask
    second = rollout.example_id % 2 == 1
    advantages = batch.experience["advantages"]
    np.testing.assert_array_equal(advantages[~second], 0.0)
    fns, theirs = models.load(str(teacher))
    other = recipes.logprobs(fns, theirs, rollout)
    expected = np.where(mask, other - batch.scores["old_logprobs"], 0)
    np.testing.assert_allclose(advantages[second], expected[second], atol=2e-5)
    assert np.abs(expected[second]).max() > 0.1


class TestRun:
  def test_three_steps_and_a_resume(self, model, teacher, tmp_path, capsys):
    theirs = shutil.copytree(teacher, tmp_path / "teacher")
    settings = {"schedule__streaming": True}  # Groups arrive one by one.
    run = make_run(model, theirs, **settings)
    rows, record = recipes.train(run.config, tmp_path / "run")
    for row in rows[1:]:
      assert row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0
      assert row["advantage/mean"] < 0  # Minus a KL.
      assert row["sampler_trainer/logprob_diff_max"] < 1e-5
    assert not [path for path in record["leaves"] if "frozen" in path]
    # Changed files of the teacher are reported, like those of the data.
    shutil.rmtree(theirs)
    shutil.copytree(model, theirs)
    run = make_run(model, theirs, run__steps=4, **settings)
    capsys.readouterr()
    assert loop.train(run, tmp_path / "run") == 0
    assert "config.method.use: the files have changed" in (
      capsys.readouterr().out
    )

  def test_no_teacher(self, model):
    with pytest.raises(
      InputError, match="needs a teacher; give method.distill"
    ):
      make_run(model, "")

  def test_a_teacher_that_is_not_there(self, model, tmp_path):
    with pytest.raises(InputError, match="nowhere: no such directory"):
      make_run(model, tmp_path / "nowhere")

  def test_other_tokens(self, model, tmp_path):
    other = chat_model.write(tmp_path / "chat")
    with pytest.raises(InputError, match="use a model with the same tokenizer"):
      make_run(model, other)

  def test_a_column_that_is_not_there(self, model, teacher, tmp_path):
    settings = of_columns(tmp_path, model, [{}] * 8)
    with pytest.raises(InputError, match="column 'teacher'"):
      make_run(model, f"{model},{teacher}", **settings)

  def test_a_column_that_names_no_teacher(self):
    learner = types.SimpleNamespace(
      column=lambda name, ids: np.where(ids == 7, 2.0, 0.0),
      frozen=["teacher_0", "teacher_1"],
    )
    rollout = types.SimpleNamespace(example_id=np.arange(8))
    scoring = types.SimpleNamespace(learner=learner, rollout=rollout)
    with pytest.raises(InputError, match="row 7 of the data: column 'teacher'"):
      distill.teacher_logprobs(scoring)
