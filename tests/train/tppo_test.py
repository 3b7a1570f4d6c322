"""Windowed rollouts and mixed groups, as the trainer does them.

A small window cuts most responses: they go on under newer weights. What the
losses saw is read from the packed batches, which the ledger does not count.
"""

import collections
import dataclasses
import itertools
import types

import chex
import jax
import numpy as np
import pytest
import tiny_run

from jaxrl_llm import checkpoint, estimators, metrics
from jaxrl_llm.train import build, collect, loop, phases, runstate
from jaxrl_llm.types import Status

WINDOW, LIMIT, GROUP, SLOTS = 3, 12, 4, 32
STEPS = 10
# So that the critic waits for several steps.
MANY = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  return tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def job(model):
  """T-PPO with a window of a quarter; other windows compile nothing new."""
  return build.make_job(
    tiny_run.make_config(
      model,
      schedule__name="window",
      schedule__window=WINDOW,
      value__pretrain_steps=0,
      run__samples_every=0,
      # A critic that says something soon.
      optimizer__value__learning_rate=1e-2,
    )
  )


def with_config(job, **changes):
  """The job under settings that do not change what is compiled."""
  config = job.config.copy_and_resolve_references()
  config.update_from_flattened_dict(
    {key.replace("__", "."): value for key, value in changes.items()}
  )
  return dataclasses.replace(job, config=config)


def whole_responses(job, **changes):
  """The same method with responses that end before the update."""
  off = {"schedule__name": "full", "schedule__window": 0}
  return with_config(job, **off, **changes)


@dataclasses.dataclass
class Step:
  """What happened in an iteration, on the host."""

  collected: runstate.Responses
  estimated: list  # (responses, scores, credit) of each estimation.
  policy: list  # PolicyBatches in the order of the updates.
  value: list
  row: dict
  after: runstate.RunState  # Counters and responses only are valid later.
  value_updates: int


def begin(job):
  return loop.start(job, None, None, None)


def run(job, steps, state=None):
  """Iterates and records: [Step], and the state at the end."""
  log = types.SimpleNamespace(policy=[], value=[], estimated=[], collected=[])

  def update(role, seen):
    def spy(state, batch, *settings):
      seen.append(jax.device_get(batch))
      return role.update(state, batch, *settings)

    return dataclasses.replace(role, update=spy)

  def estimate(*arguments):
    credit = job.estimate(*arguments)
    rewards, correct, judged, rollout, scores = jax.device_get(arguments)
    seen = types.SimpleNamespace(
      rewards=rewards,
      correct=correct,
      judged=judged,
      rollout=rollout,
      scores=scores,
      credit=jax.device_get(credit),
    )
    log.estimated.append(seen)
    return credit

  real = collect.responses

  def responses(*arguments):
    collected = real(*arguments)
    log.collected.append(jax.tree.map(np.array, collected.responses))
    return collected

  spied = dataclasses.replace(
    job,
    policy=update(job.policy, log.policy),
    value=update(job.value, log.value),
    estimate=estimate,
  )
  state = state or begin(job)
  history = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(collect, "responses", responses)
    for _ in range(steps):
      for seen in vars(log).values():
        seen.clear()
      row = loop.iterate(spied, state, metrics.PhaseTimer(), None)
      history.append(
        Step(
          collected=log.collected[0],
          estimated=list(log.estimated),
          policy=list(log.policy),
          value=list(log.value),
          row=row,
          after=state.replace(policy=None, value=None),
          value_updates=int(state.value.step),
        )
      )
  return history, state


def trained_tokens(batches):
  """(context with the token itself) -> how often a loss counted it.

  Read from the packed rows: a token is named by all tokens up to it.
  """
  count = collections.Counter()
  for batch in batches:
    packed = batch.packed
    for place in np.argwhere(packed.mask):
      count[named(packed, *place)] += 1
  return count


def named(packed, m, r, c):
  """All tokens of the sample up to the target of a packed position."""
  row = {k: packed[k][m, r] for k in ("tokens", "segments", "prefixes")}
  segment, prefix = row["segments"][c], row["prefixes"][c]
  here = np.arange(row["tokens"].size) <= c
  own = (row["segments"] == segment) & here
  shared = (row["segments"] == prefix) & (prefix > 0)
  context = [*row["tokens"][shared], *row["tokens"][own]]
  return (*map(int, context), int(packed.targets[m, r, c]))


def written_tokens(rollout, rows, begins=None):
  """The same names for the tokens of a rollout, from `begins` on."""
  count = collections.Counter()
  for i in rows:
    prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
    whole = (*map(int, prompt), *map(int, rollout.tokens[i]))
    for t in range(0 if begins is None else begins[i], rollout.lengths[i]):
      count[whole[: len(prompt) + t + 1]] += 1
  return count


def strip(state):
  """All of a state but the sampler's copy, as a dict."""
  return {k: v for k, v in state.items() if k != "sampler"}


def total(counters):
  return sum(counters, collections.Counter())


def ended(responses):
  return np.flatnonzero(responses.ended)


@pytest.fixture(scope="module")
def history(job):
  return run(job, STEPS)[0]


@pytest.fixture(scope="module")
def patient(job):
  """The critic waits for many responses."""
  return run(with_config(job, schedule__min_ended=MANY), STEPS)[0]


class TestWholeWindow:
  def test_is_vapo_bit_for_bit(self, job, tmp_path):
    trees, rows, samples = [], [], []
    short = {"run__steps": 4, "run__samples_every": 2, "checkpoint__every": 9}
    for name, chosen in (
      ("windows", with_config(job, schedule__window=LIMIT, **short)),
      ("vapo", whole_responses(job, **short)),
    ):
      loop.train(chosen, tmp_path / name)
      state = newest(chosen, tmp_path / name)
      counters = (state.step, state.position, state.member, state.samples)
      assert counters == (4, 32, 0, 128)
      assert state.unfinished is None and state.waiting is None
      trees.append(jax.device_get((state.policy, state.value)))
      rows.append(tiny_run.comparable(tmp_path / name))
      samples.append((tmp_path / name / "samples.jsonl").read_bytes())
    chex.assert_trees_all_equal(*trees)
    assert rows[0] == rows[1] and len(rows[0]) == 5
    assert samples[0] == samples[1]
    assert any(row["reward/std"] > 0 for row in rows[0][1:])

  def test_a_small_window_is_another_run(self, job, history):
    other = run(whole_responses(job), 1)[0][0]
    assert other.row["rollout/truncated_fraction"] == 0
    assert history[0].row["rollout/truncated_fraction"] > 0.5


class TestEveryTokenOnce:
  def test_policy(self, history):
    trained = total(trained_tokens(step.policy) for step in history)
    new = []
    for step in history:
      rollout = step.collected.rollout
      new.append(written_tokens(rollout, range(SLOTS), rollout.window_start))
      # And in the step that wrote it.
      assert trained_tokens(step.policy) == new[-1]
    assert trained == total(new)
    # Whatever the windows were, together they are the whole responses.
    released = [
      written_tokens(s.collected.rollout, ended(s.collected)) for s in history
    ]
    last = history[-1].after.unfinished.rollout
    alive = written_tokens(last, range(len(last.lengths)))
    assert trained == total([*released, alive])
    assert total(released).total() > 300

  def test_value(self, history):
    for step in history:
      responses = step.collected
      expected = written_tokens(responses.rollout, ended(responses))
      assert trained_tokens(step.value) == expected

  def test_value_of_a_critic_that_waits(self, patient):
    trained = total(trained_tokens(step.value) for step in patient)
    released = total(
      written_tokens(s.collected.rollout, ended(s.collected)) for s in patient
    )
    waiting = patient[-1].after.waiting
    if waiting is not None:
      rows = range(len(waiting.rewards))
      released -= written_tokens(waiting.rollout, rows)
    assert trained == released

  @pytest.mark.parametrize("role", ["policy", "value"])
  @pytest.mark.parametrize(
    "fault",
    [lambda b: b[:-1], lambda b: [*b, b[-1]]],
    ids=["lost", "doubled"],
  )
  def test_a_fault_stops_the_run(self, job, monkeypatch, role, fault):
    name = f"update_{role}"
    real = getattr(phases, name)

    def update(*arguments):
      *others, batches, rng = arguments
      return real(*others, fault(batches) if batches else batches, rng)

    # Two mini-batches a step, so that one remains.
    chosen = whole_responses(job) if role == "value" else job
    monkeypatch.setattr(phases, name, update)
    with pytest.raises(RuntimeError, match=f"times by the {role} loss"):
      run(chosen, 3)


class TestSlots:
  def test_their_number_stays(self, history):
    for step in history:
      rollout = step.collected.rollout
      assert rollout.sample_id.shape == (SLOTS,)
      assert np.unique(rollout.sample_id).size == SLOTS
      assert (rollout.lengths - rollout.window_start).max() <= WINDOW

  def test_a_response_is_of_several_versions(self, history):
    versions = [
      np.unique(rollout.version[i, : rollout.lengths[i]]).size
      for rollout in (step.collected.rollout for step in history)
      for i in range(SLOTS)
    ]
    assert max(versions) == LIMIT // WINDOW
    for number, step in enumerate(history):
      rollout = step.collected.rollout
      column = np.arange(LIMIT)[None]
      new = rollout.mask & (column >= rollout.window_start[:, None])
      assert (rollout.version[new] == number).all()
      assert (rollout.version[rollout.mask & ~new] < number).all()

  def test_what_was_written_stays_as_it_was(self, history):
    for before, after in zip(history, history[1:]):
      cut = before.after.unfinished.rollout
      same = after.collected.rollout
      for i, sample in enumerate(cut.sample_id):
        (j,) = np.flatnonzero(same.sample_id == sample)
        length = cut.lengths[i]
        assert same.window_start[j] == length
        for name in ("tokens", "behavior_logprobs", "version", "mask"):
          np.testing.assert_array_equal(
            same[name][j, :length], cut[name][i, :length]
          )

  def test_ids_never_repeat(self, history):
    begun, alive = [], set()
    for step in history:
      ids = step.collected.rollout.sample_id.tolist()
      begun += [i for i in ids if i not in alive]
      gone = set(step.collected.rollout.sample_id[ended(step.collected)])
      alive = set(ids) - gone
    assert begun == list(range(len(begun)))
    assert history[-1].after.samples == len(begun)

  def test_every_prompt_gets_its_group(self, history):
    members = collections.defaultdict(set)
    split = False
    for step in history:
      rollout = step.collected.rollout
      new = rollout.window_start == 0
      for prompt, sample in zip(rollout.prompt_id[new], rollout.sample_id[new]):
        members[int(prompt)].add(int(sample))
      split |= bool(step.after.member)
    assert split  # Some prompt had to wait for slots.
    prompts = sorted(members)
    assert prompts == list(range(len(prompts)))
    for prompt in prompts[:-1]:
      first = prompt * GROUP
      assert members[prompt] == set(range(first, first + GROUP))
    begun = history[-1].after.member
    assert len(members[prompts[-1]]) == (begun or GROUP)

  def test_what_is_released_is_complete(self, history):
    for step in history:
      rollout = step.collected.rollout
      for i in ended(step.collected):
        stopped = rollout.tokens[i, rollout.lengths[i] - 1] == 1
        assert stopped or rollout.lengths[i] == LIMIT
        expected = Status.FINISHED if stopped else Status.OVERLONG
        assert rollout.status[i] == expected
      kept = step.after.unfinished
      assert (kept.rollout.status == Status.TRUNCATED).all()
      assert kept.rollout.lengths.max() < LIMIT
      assert len(kept.rewards) == SLOTS - ended(step.collected).size

  def test_groups_share_a_prompt(self, history):
    for step in history:
      rollout = step.collected.rollout
      pairs = set(zip(rollout.group.tolist(), rollout.prompt_id.tolist()))
      assert len(pairs) == np.unique(rollout.group).size
      assert len(pairs) == np.unique(rollout.prompt_id).size


class TestCredit:
  def test_advantages_are_those_of_the_paper(self, job, history):
    alpha, seen_cut, seen_ended = job.config.estimator.alpha, 0, 0
    for step in history:
      (seen,) = step.estimated
      rollout, values = seen.rollout, np.float64(seen.scores.values)
      for i in range(SLOTS):
        length = int(rollout.lengths[i])
        lambda_ = max(0.0, 1.0 - 1.0 / (alpha * length))
        cut = rollout.status[i] == Status.TRUNCATED
        behind = values[i, length - 1] if cut else 0.0
        after = np.append(values[i, 1:length], behind)
        rewards = np.zeros(length)
        rewards[-1] = 0.0 if cut else seen.rewards[i]
        deltas = rewards + after - values[i, :length]
        expected, later = np.zeros(length), 0.0
        for t in reversed(range(length)):
          expected[t] = later = deltas[t] + lambda_ * later
        np.testing.assert_allclose(
          seen.credit.advantages[i, :length], expected, atol=1e-5
        )
        if cut:
          assert seen.credit.advantages[i, length - 1] == 0
        seen_cut, seen_ended = seen_cut + cut, seen_ended + (not cut)
      # The losses get these numbers, each at its place.
      assert packed_column(step.policy, "advantages") == column_of(
        rollout, seen.credit.advantages, seen.credit.policy_mask
      )
    assert seen_cut > 100 and seen_ended > 50
    assert np.abs(values).max() > 0.1

  def test_nothing_after_the_window_matters(self, job, history):
    seen = history[-1].estimated[0]
    cut = seen.rollout.status == Status.TRUNCATED
    after = np.arange(LIMIT)[None] >= seen.rollout.lengths[:, None]
    values = np.where(after, np.nan, seen.scores.values)
    scores = seen.scores.replace(
      values=values,
      next_values=np.where(cut, 7.0, seen.scores.next_values),
    )
    again = job.estimate(
      np.where(cut, 5.0, seen.rewards).astype(np.float32),
      seen.correct,
      seen.judged,
      seen.rollout,
      scores.replace(values=values.astype(np.float32)),
    )
    mask = seen.credit.policy_mask
    np.testing.assert_array_equal(again.policy_mask, mask)
    np.testing.assert_array_equal(
      np.asarray(again.advantages)[mask], seen.credit.advantages[mask]
    )

  def test_targets_are_returns_of_what_ended(self, job, history):
    for step in history:
      (seen,) = step.estimated
      outcome = np.repeat(seen.rewards[:, None], LIMIT, axis=1)
      mask = seen.rollout.mask & ended_rows(seen)[:, None]
      for batch in step.value:
        assert set(np.unique(batch.returns[batch.packed.mask])) <= {-1.0, 1.0}
      assert returns_of(step.value) == column_of(seen.rollout, outcome, mask)
      rng = np.random.default_rng(0)
      other = job.estimate(
        seen.rewards,
        seen.correct,
        seen.judged,
        seen.rollout,
        seen.scores.replace(
          values=rng.normal(size=mask.shape).astype(np.float32)
        ),
      )
      np.testing.assert_array_equal(other.value_mask, mask)
      # λ = 1 telescopes: what is left of V is rounding.
      np.testing.assert_allclose(
        np.asarray(other.returns)[mask], outcome[mask], atol=1e-5
      )

  def test_the_opinion_on_a_prefix_changes_nothing(self, job, history):
    asked = []
    real = job.pool

    class Opinionated:
      """Finds every response right that has not ended."""

      def __getattr__(self, name):
        return getattr(real, name)

      def score(self, texts, *others):
        asked.append(len(texts))
        return real.score(texts, *others)

    steps, _ = run(dataclasses.replace(job, pool=Opinionated()), 4)
    assert asked == [n for n in (ended(s.collected).size for s in steps) if n]
    for step, same in zip(steps, history):
      seen, cut = step.estimated[0], ~step.collected.ended
      assert not step.collected.correct[cut].any()
      assert not step.collected.rewards[cut].any()
      assert step.row == same.row
      praised = job.estimate(
        np.where(cut, 1.0, seen.rewards).astype(np.float32),
        seen.correct | cut,
        seen.judged,
        seen.rollout,
        seen.scores,
      )
      chex.assert_trees_all_equal(jax.device_get(praised), seen.credit)


def ended_rows(seen):
  return seen.rollout.status != Status.TRUNCATED


def named_values(rollout, i, t):
  prompt = rollout.prompt_tokens[i, : rollout.prompt_lengths[i]]
  return (*map(int, prompt), *map(int, rollout.tokens[i, : t + 1]))


def column_of(rollout, values, mask):
  """Multiset of (token, value) at the masked places of a [B, T] array."""
  return collections.Counter(
    (named_values(rollout, i, t), float(values[i, t]))
    for i, t in np.argwhere(mask)
  )


def packed_column(batches, name):
  """The same of a column of packed batches."""
  return collections.Counter(
    (named(b.packed, *place), float(b.columns[name][tuple(place)]))
    for b in batches
    for place in np.argwhere(b.packed.mask)
  )


def returns_of(batches):
  return collections.Counter(
    (named(b.packed, *place), float(b.returns[tuple(place)]))
    for b in batches
    for place in np.argwhere(b.packed.mask)
  )


class TestMinEnded:
  def test_the_critic_waits_and_the_policy_goes_on(self, patient):
    waiting, updates, skipped = 0, 0, 0
    for step in patient:
      ready = waiting + ended(step.collected).size
      assert step.policy
      if ready < MANY:
        assert not step.value and step.value_updates == updates
        assert len(step.after.waiting.rewards) == ready
        assert "value/loss" not in step.row
        waiting, skipped = ready, skipped + 1
      else:
        assert step.value and step.after.waiting is None
        updates, waiting = step.value_updates, 0
    assert skipped >= 3 and updates >= 2

  def test_those_that_wait_are_not_in_the_metrics(self, job, patient):
    for step in patient:
      # One law: all new tokens were written by the weights that score them.
      assert step.row["sampler_trainer/logprob_diff_max"] <= 1e-5
      assert step.row["staleness/max"] == 0
      (seen,) = step.estimated
      rollout = step.collected.rollout
      assert (
        seen.credit.policy_mask.sum()
        == (rollout.lengths - rollout.window_start).sum()
      )

  def test_those_that_wait_have_values(self, patient):
    # A critic that was never updated says 0.
    late = [step for step in patient if step.value_updates and not step.value]
    assert late
    for step in late:
      (seen,) = step.estimated
      for i in np.flatnonzero(seen.credit.value_mask.any(axis=1)):
        assert seen.scores.values[i, : seen.rollout.lengths[i]].any()


class TestKlInReward:
  def test_is_in_the_targets_of_those_that_waited(self, job):
    beta = 0.1
    changes = {
      "loss__kl_reward_coefficient": beta,
      "schedule__min_ended": MANY,
    }
    config = with_config(job, **changes).config
    made = build.make_job(config)
    kept = {"config": config, "recipe": made.recipe, "estimate": made.estimate}
    steps, _ = run(dataclasses.replace(job, **kept), 5)
    late = [step for step in steps if step.value and step.value_updates]
    waited = 0
    for step in late:
      (seen,) = step.estimated
      fresh = set(step.collected.rollout.sample_id.tolist())
      kl = seen.scores.old_logprobs - seen.scores.ref_logprobs
      for i in np.flatnonzero(ended_rows(seen)):
        length = seen.rollout.lengths[i]
        assert seen.scores.old_logprobs[i, :length].all()
        assert np.abs(kl[i, :length]).max() > 1e-4
        to_go = np.cumsum(kl[i, :length][::-1])[::-1]
        np.testing.assert_allclose(
          seen.credit.returns[i, :length],
          seen.rewards[i] - beta * to_go,
          atol=1e-4,
        )
        waited += int(seen.rollout.sample_id[i]) not in fresh
    assert waited > 5


def newest(job, workdir):
  saver = checkpoint.Checkpointer(workdir / "checkpoints", keep=2)
  state = runstate.resume(job, saver, saver.latest_step())
  saver.close()
  return state


def tempered_of(job):
  """The job whose sampler is told the entropies of the batch before."""
  recipe = dataclasses.replace(job.recipe, tempered=True)
  return dataclasses.replace(job, recipe=recipe)


class TestTempering:
  def test_the_sampler_goes_by_the_batch_before(self, job, history):
    told = []

    class Listening:
      """An engine without tempering that notes what it was to go by."""

      def __getattr__(self, name):
        return getattr(job.engine, name)

      def generate_window(self, *arguments, control, **settings):
        told.append(control)
        return job.engine.generate_window(*arguments, control=None, **settings)

    chosen = dataclasses.replace(tempered_of(job), engine=Listening())
    steps, state = run(chosen, 3)
    # Nothing is known before the first step: zeros change no temperature.
    assert all(number == 0 for number in told[0])
    for step, after in zip(steps, [*told[1:], state.entropy], strict=True):
      (seen,) = step.estimated
      tokens = seen.scores.entropies[seen.credit.policy_mask]
      expected = estimators.entropy_statistics(
        tokens, np.ones(tokens.shape, bool)
      )
      np.testing.assert_allclose(after, expected, rtol=1e-5)
      assert after.rms > 0
    assert [step.row for step in steps] == [step.row for step in history[:3]]

  def test_the_checkpoint_holds_them(self, job, tmp_path):
    chosen, numbers = tempered_of(job), np.float32([0.1, 0.7, 1.3, -2.1])
    state = begin(chosen)
    state.entropy = estimators.EntropyStatistics(*numbers)
    saver = checkpoint.Checkpointer(tmp_path, keep=1)
    runstate.save(chosen, state, saver)
    saver.wait()
    again = runstate.resume(chosen, saver, 0)
    saver.close()
    chex.assert_trees_all_equal(again.entropy, state.entropy)


def ewma_of(job, decay):
  """The job around the averaged policy; the losses stay as compiled."""
  config = with_config(
    job, off_policy__proximal="ewma", off_policy__ewma_decay=decay
  ).config
  made = build.make_job(config)
  return dataclasses.replace(
    job, config=config, recipe=made.recipe, average=made.average
  )


class TestResume:
  @pytest.mark.parametrize("kind", ["plain", "waiting", "ewma"])
  def test_in_the_middle_of_responses_is_exact(self, job, tmp_path, kind):
    chosen = {
      "plain": lambda: job,
      "waiting": lambda: with_config(job, schedule__min_ended=MANY),
      "ewma": lambda: ewma_of(job, 0.5),
    }[kind]()
    chosen = with_config(
      chosen, run__steps=5, eval__every=2, checkpoint__every=9
    )
    loop.train(chosen, tmp_path / "whole")
    loop.train(with_config(chosen, run__steps=2), tmp_path / "parts")
    kept = newest(chosen, tmp_path / "parts")
    assert kept.step == 2 and len(kept.unfinished.rewards) > 5
    assert (kept.unfinished.rollout.lengths > 0).all()
    assert np.unique(kept.unfinished.rollout.version).size > 1
    assert (kept.waiting is not None) == (kind == "waiting")
    assert (kept.average is not None) == (kind == "ewma")
    loop.train(chosen, tmp_path / "parts")
    assert tiny_run.comparable(tmp_path / "parts") == tiny_run.comparable(
      tmp_path / "whole"
    )
    both = [newest(chosen, tmp_path / name) for name in ("whole", "parts")]
    chex.assert_trees_all_equal(*(jax.device_get(strip(s)) for s in both))
    assert both[0].step == 5

  def test_the_checkpoint_holds_every_array(self, job, tmp_path):
    chosen = with_config(job, schedule__min_ended=MANY)
    _, state = run(chosen, 2)
    saver = checkpoint.Checkpointer(tmp_path, keep=1)
    runstate.save(chosen, state, saver)
    saver.wait()
    again = runstate.resume(chosen, saver, 2)
    saver.close()
    assert again.sampler.version == state.sampler.version == 2
    assert again.sampler.digest == state.sampler.digest
    chex.assert_trees_all_equal(
      *(jax.device_get(strip(s)) for s in (again, state))
    )


class TestEwma:
  def test_without_memory_the_average_is_the_policy(self, job):
    chosen = ewma_of(job, 0.0)
    (step,), state = run(chosen, 1)
    chex.assert_trees_all_equal(
      jax.device_get(state.average["params"]),
      jax.device_get(state.policy.params),
    )
    (plain,), _ = run(job, 1)
    assert len(step.policy) == 2
    # The first mini-batch of a step cannot tell it from 'recompute'.
    chex.assert_trees_all_equal(step.policy[0], plain.policy[0])


class Verdicts:
  """A pool that finds a text right as it is told."""

  def __init__(self, pool, right):
    self._pool, self._right = pool, right

  def __getattr__(self, name):
    return getattr(self._pool, name)

  def score(self, texts, *others):
    scores = self._pool.score(texts, *others)
    return [
      dataclasses.replace(score, correct=self._right(text))
      for score, text in zip(scores, texts)
    ]


class TestMixedGroups:
  def collect(self, job, right, **changes):
    """Responses of one step whose verdicts are `right(text)`."""
    chosen = whole_responses(job, schedule__dynamic_sampling=True, **changes)
    chosen = dataclasses.replace(chosen, pool=Verdicts(job.pool, right))
    state = begin(chosen)
    collected = collect.responses(chosen, state, metrics.PhaseTimer())
    return collected, state, chosen

  def test_gives_so_many_groups_and_all_mixed(self, job):
    collected, state, _ = self.collect(job, lambda text: len(text) % 5 == 0)
    responses = collected.responses
    group, rounds = responses.rollout.group, collected.row["rollout/rounds"]
    np.testing.assert_array_equal(np.bincount(group), [GROUP] * 8)
    right = np.bincount(group, responses.correct)
    assert (right > 0).all() and (right < GROUP).all()
    assert rounds > 1  # One round had too few.
    assert (state.position, state.samples) == (8 * rounds, 32 * rounds)
    assert np.unique(responses.rollout.sample_id).size == 32

  def test_mixed_groups_alone_are_as_without_it(self, job):
    def drawn(dynamic):
      turn = itertools.cycle([True, False])
      chosen = whole_responses(job, schedule__dynamic_sampling=dynamic)
      pool = Verdicts(job.pool, lambda text: next(turn))
      state = begin(job)
      collected = collect.responses(
        dataclasses.replace(chosen, pool=pool), state, metrics.PhaseTimer()
      )
      counters = state.step, state.position, state.member, state.samples
      return collected.responses, counters

    (mixed, after), (plain, expected) = drawn(True), drawn(False)
    assert plain.correct.sum() == SLOTS // 2 and collect.mixed(plain).all()
    chex.assert_trees_all_equal(mixed, plain)
    assert after == expected

  def test_the_surplus_is_dropped(self, job):
    right = lambda text: len(text) % 2 == 0
    collected, state, chosen = self.collect(job, right, schedule__oversample=3)
    assert collected.row["rollout/rounds"] == 1
    assert (state.position, state.samples) == (24, 96)
    # All that was drawn, in the order of the stream.
    everything = whole_responses(chosen, data__prompts_per_step=24)
    everything = with_config(everything, schedule__dynamic_sampling=False)
    drawn = collect.responses(
      everything, begin(chosen), metrics.PhaseTimer()
    ).responses
    mixed = np.flatnonzero(collect.mixed(drawn))
    assert mixed.size > 8 * GROUP
    assert collected.row["rollout/mixed_fraction"] == mixed.size / 96
    first = runstate.take(drawn, mixed[: 8 * GROUP])
    np.testing.assert_array_equal(
      collected.responses.rollout.sample_id, first.rollout.sample_id
    )
    np.testing.assert_array_equal(collected.responses.rewards, first.rewards)

  @pytest.mark.parametrize("right", [True, False])
  def test_gives_up_with_the_numbers(self, job, right):
    with pytest.raises(
      runstate.TrainingStopped,
      match="^3 rounds drew 48 prompts, but only 0 of the 8 wanted have right",
    ):
      self.collect(
        job,
        lambda text: right,
        schedule__max_rounds=3,
        schedule__oversample=2,
      )

  def test_verdicts_count_not_shaped_rewards(self, job):
    """Responses of other lengths are not yet a mixed group."""
    shaped = {"reward__overlong_buffer": LIMIT}
    with pytest.raises(runstate.TrainingStopped):
      self.collect(job, lambda text: True, schedule__max_rounds=1, **shaped)
    right = lambda text: len(text) % 3 == 0
    plain = self.collect(job, right)[0].responses
    punished = self.collect(job, right, **shaped)[0].responses
    chex.assert_trees_all_equal(punished, plain)
    assert set(np.unique(plain.rewards)) == {-1.0, 1.0}

  def test_a_step_trains_on_them(self, job):
    chosen = whole_responses(job, schedule__dynamic_sampling=True)
    right = lambda text: len(text) % 5 == 0
    chosen = dataclasses.replace(chosen, pool=Verdicts(job.pool, right))
    (step,), state = run(chosen, 1)
    responses = step.collected
    expected = written_tokens(responses.rollout, range(SLOTS))
    assert trained_tokens(step.policy) == expected
    assert step.row["rollout/rounds"] > 1
    assert step.row["rollout/zero_variance_groups"] == 0
    assert state.position == 8 * step.row["rollout/rounds"]
