"""Tests of jaxrl_llm.tools.simulate and scripts/simulate.py."""

import dataclasses
import math
import pathlib

import numpy as np
import pytest
import simulate as script
from helpers import scripted

from jaxrl_llm.rollout.schedule import RolloutSettings
from jaxrl_llm.rollout.writer import Weights
from jaxrl_llm.sampling import EngineConfig, rules
from jaxrl_llm.tools import simulate
from jaxrl_llm.tools.simulate import Plane, Requests
from jaxrl_llm.tools.simulate.engine import SimulatedEngine, SimulatedWriter

_FREE = simulate.CostModel(decode=(Plane(1.0, 0.0, 0.0),))
# A decode step of n slots takes 10 + n seconds.
_PRICES = simulate.CostModel(
  decode=(Plane(10.0, 1.0, 0.0),),
  prefill_call_s=2.0,
  prefill_token_s=0.5,
  train_step_s=3.0,
  train_token_s=0.25,
  sync_s=5.0,
  scheduler_step_s=0.5,
)


def _single(*lengths, prompt=4):
  """Makes requests for one response per prompt."""
  lengths = np.array(lengths)[:, None]
  return Requests(np.full(len(lengths), prompt), lengths)


def _drawn(prompts=60, group_size=4, seed=0, **changes):
  settings = {"median": 30, "p99": 200, "maximum": 250, "between": 0.5}
  lengths = simulate.lognormal(
    prompts, group_size, seed=seed, **settings | changes
  )
  return Requests(np.full(prompts, 9), lengths)


def _config(requests, slots, page_size):
  longest = int(requests.prompt_lengths.max()), int(requests.lengths.max())
  return EngineConfig(slots, *longest, stop_tokens=(), page_size=page_size)


def _columns(rows, cost):
  """Returns arrays by name, with the parts of a step's time."""
  trace = {name: np.array([row[name] for row in rows]) for name in rows[0]}
  host_s = cost.scheduler_step_s * trace["decode_calls"]
  return trace | {
    "generate_s": trace["wall_s"] - trace["host_s"],
    "prefill_s": trace["host_s"] - host_s,
    "idle_s": host_s + trace["waited_s"],
  }


def _in_turns(
  requests, cost=_PRICES, *, slots=16, page_size=16, steps=6, how=None, **sizes
):
  """Runs the worker; `how` has further arguments of `pipelined`."""
  sizes = {"groups": 10, "group_size": requests.lengths.shape[1]} | sizes
  settings = RolloutSettings(**{"in_flight": sizes["groups"]} | sizes)
  config = _config(requests, slots, page_size)
  rows = simulate.pipelined(
    requests, cost, config, settings, steps=steps, **how or {}
  )
  return _columns(rows, cost)


def _pipelined(requests, cost=_PRICES, *, lag=0, streaming=False, **sizes):
  how = {"lag": lag, "streaming": streaming}
  return _in_turns(requests, cost, how=how, **sizes)


def _static(requests, cost=_PRICES, **how):
  return _in_turns(requests, cost, how={"rule": simulate.static_batches}, **how)


def _over_provisioned(requests, cost=_PRICES, *, max_staleness=math.inf, **how):
  how |= {"stop": "first_groups", "max_staleness": max_staleness}
  return _in_turns(requests, cost, **{"in_flight": 15} | how)


def _asynchronous(
  requests, cost=_PRICES, *, slots=16, page_size=16, groups=10, steps=6, lag
):
  config = _config(requests, slots, page_size)
  rows = simulate.asynchronous(
    requests, cost, config, groups=groups, steps=steps, lag=lag
  )
  return _columns(rows, cost)


_MODES = {
  "static": _static,
  "refill": _in_turns,
  "window": lambda *a, **how: _in_turns(*a, **how, window=40),
  "parked": lambda *a, **how: _over_provisioned(*a, **how),
  "fixed lag": lambda *a, **how: _pipelined(*a, **how, lag=2),
  "periodic": lambda *a, **how: _pipelined(*a, **how, streaming=True),
  "one step off": lambda *a, **how: _asynchronous(*a, **how, lag=1),
  "unbounded": lambda *a, **how: _asynchronous(*a, **how, lag=math.inf),
}


class TestEveryMode:
  @pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES)
  def test_no_token_is_lost_and_the_parts_of_a_step_add_up(self, mode):
    trace = mode(_drawn())
    written, trained = trace["tokens"].cumsum(), trace["trained"].cumsum()
    # A window is trained at once, even if its response continues.
    parked = 0 if mode is _MODES["window"] else trace["parked"]
    np.testing.assert_array_equal(written, trained + parked)
    assert np.all(trace["responses"] > 0)
    parts = [trace[name] for name in ("generate_s", "prefill_s", "idle_s")]
    if mode in (_MODES["fixed lag"], _MODES["periodic"]):
      # Steps are the trainer's; the sampler may be ahead.
      assert np.all(sum(parts).cumsum() <= trace["step_s"].cumsum())
      return
    if mode not in (_MODES["one step off"], _MODES["unbounded"]):
      parts.append(trace["train_s"])
    np.testing.assert_allclose(trace["step_s"], sum(parts) + 5, rtol=1e-12)


class TestByHand:
  """Three slots, prompts of 4 tokens, costs of full and half seconds."""

  lengths = _single(2, 4, 3, 1, 5, 2)
  sizes = {"slots": 3, "groups": 6, "steps": 1, "page_size": 64}

  def _check(self, trace, **expected):
    for name, value in expected.items():
      np.testing.assert_allclose(trace[name], value, err_msg=name)

  def test_static(self):
    # 2, 4, 3 and then 1, 5, 2: 13 13 12 11, 13 12 11 11 11.
    self._check(
      _static(self.lengths, **self.sizes),
      generate_s=[107],
      decode_steps=[9],
      prefill_s=[2 * (2 + 6)],
      train_s=[3 + 41 / 4],
      idle_s=[4 * 0.5],  # When a slot became free, and at the end.
      step_s=[143.25],
      responses=[6],
      kv_capacity=[3 * 64],
    )

  def test_refill(self):
    # 2 steps of 2 4 3; 1 of 4 3 1; 5 of 4 5 2, one of which has 1 left.
    self._check(
      _in_turns(self.lengths, **self.sizes),
      generate_s=[26 + 13 + 58],
      decode_steps=[8],
      prefill_s=[(2 + 6) + (2 + 2) + (2 + 4)],
      idle_s=[3 * 0.5],
      step_s=[97 + 18 + 1.5 + 13.25 + 5],
    )

  def test_window(self):
    sizes = self.sizes | {"groups": 3, "steps": 3}
    self._check(
      _in_turns(self.lengths, **sizes, window=2),
      generate_s=[26, 24, 26],  # The last step starts over with 5, 2, 2.
      # Two truncated ones, of 6 tokens and one at a time, and a new one.
      prefill_s=[2 + 6, 2 * 2 + 6 + 2 + 2, 2 + 6],
      tokens=[6, 4, 6],
      trained=[6, 4, 6],
      train_s=[3 + 18 / 4, 3 + 20 / 4, 3 + 18 / 4],
      responses=[1, 3, 2],
      off_policy=[0, 0, 0],
    )

  def test_over_provisioned(self):
    sizes = {"slots": 3, "groups": 1, "steps": 2, "page_size": 2}
    self._check(
      _over_provisioned(_single(2, 4, 3), **sizes, in_flight=2),
      generate_s=[24, 24],
      prefill_s=[2 + 4, (2 + 3) + (2 + 2)],
      trained=[2, 4],
      off_policy=[0, 2],
      max_staleness=[0, 1],
      parked=[2, 2],
    )

  def test_asynchronous(self):
    # Response: 4 prefill, 22 decoding, 0.5 host. Step: 4.5 training, 5 sync.
    sizes = {"slots": 1, "groups": 1, "steps": 2, "page_size": 2}
    self._check(
      _asynchronous(_single(2), **sizes, lag=1),
      step_s=[26.5 + 26.5 + 5, 26.5 + 5],
      train_s=[4.5, 4.5],
      off_policy=[0, 2],
      max_staleness=[0, 1],
      parked=[2, 2],
    )


def test_limits_are_refill():
  drawn = _drawn()
  refill = _in_turns(drawn)
  for trace in (
    _in_turns(drawn, window=int(drawn.lengths.max())),
    _over_provisioned(drawn, in_flight=10),  # None in reserve.
  ):
    for name, value in refill.items():
      np.testing.assert_array_equal(trace[name], value, err_msg=name)


def test_over_provisioning_waits_for_what_is_too_old():
  args, ages = (_drawn(prompts=200, between=0.0), _FREE), {}
  for age in (1, math.inf):
    trace = _over_provisioned(*args, steps=12, in_flight=20, max_staleness=age)
    ages[age] = trace["max_staleness"].max()
  assert ages[1] == 1 < ages[math.inf]


class TestAsynchronous:
  def test_without_lag_it_takes_turns(self):
    trace, refill = _asynchronous(_drawn(), lag=0), _in_turns(_drawn())
    np.testing.assert_allclose(trace["step_s"], refill["step_s"])
    np.testing.assert_array_equal(trace["tokens"], refill["tokens"])
    assert not trace["off_policy"].any()

  @pytest.mark.parametrize("lag", [1, 2, 3])
  @pytest.mark.parametrize("train_s", [1.0, 3000.0])
  def test_no_token_is_older_than_the_lag(self, lag, train_s):
    cost = dataclasses.replace(_PRICES, train_step_s=train_s)
    trace = _asynchronous(_drawn(prompts=150), cost, steps=12, lag=lag)
    assert 1 <= trace["max_staleness"].max() <= lag

  def test_interrupted_responses_are_prefilled_again(self):
    args = _drawn(), dataclasses.replace(_FREE, prefill_token_s=1e-6)
    once = _in_turns(*args)["prefill_s"].sum()
    assert _asynchronous(*args, lag=math.inf)["prefill_s"].sum() > 2 * once


class TestPipelined:
  @pytest.mark.parametrize("lag", [1, 3])
  def test_every_token_is_as_late_as_the_lag(self, lag):
    trace = _pipelined(_drawn(), lag=lag)
    expected = np.minimum(np.arange(6), lag)
    np.testing.assert_array_equal(trace["max_staleness"], expected)
    late = np.where(expected > 0, trace["trained"], 0)
    np.testing.assert_array_equal(trace["off_policy"], late)

  def test_periodic_takes_turns_but_trains_meanwhile(self):
    turns, trace = _in_turns(_drawn()), _pipelined(_drawn(), streaming=True)
    assert not trace["off_policy"].any()
    np.testing.assert_array_equal(trace["tokens"], turns["tokens"])
    assert np.all(trace["step_s"] < turns["step_s"])
    least = np.maximum(trace["train_s"], trace["generate_s"])
    assert np.all(trace["step_s"] > least)


class TestPredict:
  @pytest.mark.parametrize(
    "count, rule",
    [(40, rules.continuous_batching), (16, rules.stop_after_groups(9))],
    ids=["refill", "first_groups"],
  )
  def test_calls_steps_and_cache_are_those_of_the_engine(self, count, rule):
    totals = np.random.default_rng(3).integers(2, 50, count).tolist()
    prompts = [scripted.prompt(total, i) for i, total in enumerate(totals)]
    engine = scripted.engine()
    scripted.generate(prompts, rule=rule)
    requests = Requests(
      np.asarray([len(prompt) for prompt in prompts]),
      np.asarray([[len(scripted.response(prompt)[0])] for prompt in prompts]),
    )
    simulated = SimulatedEngine(requests, _FREE, engine.config)
    writer, numbers = SimulatedWriter(simulated), range(count)
    rollout = writer.begin(numbers, requests.sample_ids(numbers))
    writer.write(rollout, Weights(object()), rule=rule)
    assert [call[:3] for call in simulated.trace] == [
      call[:3] for call in engine.trace
    ]
    stats = simulate.predict(requests, _FREE, engine.config, rule=rule)
    assert stats == simulated.last_stats
    counters = len(stats) - 2  # The others are seconds.
    assert stats[:counters] == engine.last_stats[:counters]

  def test_padded_prices_are_those_of_whole_programs(self):
    cost = simulate.CostModel(decode=(Plane(0.0, 1.0, 0.0),), padded=True)

    def seconds(*lengths):
      requests = _single(*lengths)
      config = _config(requests, 64, None)
      return simulate.predict(requests, cost, config).wall_s

    # 64 slots for one response of 10 tokens: the smallest batch (16) from the
    # start.
    assert seconds(10) == 10 * 16
    # All but 2 of 64 responses end at once.
    assert seconds(*[1] * 62, 10, 10) == 64 + 9 * 16

  @pytest.mark.parametrize(
    "lengths", [[3], [[0]], np.zeros((0, 4)), [[1], [2]]]
  )
  def test_refuses_what_is_no_grid_of_lengths(self, lengths):
    with pytest.raises(ValueError, match="lengths"):
      Requests(np.asarray([3]), np.asarray(lengths))


class TestCosts:
  def test_fit_finds_the_prices_that_made_the_rows(self):
    rng = np.random.default_rng(0)
    slots, steps = rng.choice([4, 16, 64], 40), rng.integers(1, 65, 40)
    positions = rng.integers(1, 50, 40) * 512
    prefills = rng.integers(0, 50, (40, 2))
    seconds = 0.013 + steps * (2e-3 + 1e-4 * slots + 1e-7 * positions)
    seconds += prefills @ [2e-2, 1e-5]
    cost = simulate.fit(
      np.column_stack([slots, steps, positions, prefills, seconds])
    )
    np.testing.assert_allclose(cost.decode, [(2e-3, 1e-4, 1e-7)], rtol=1e-8)
    assert cost.scheduler_step_s == pytest.approx(0.013)
    assert cost.prefill_call_s == pytest.approx(2e-2)
    assert cost.prefill_token_s == pytest.approx(1e-5)
    assert cost.padded

  def test_fit_knows_no_negative_price_and_refuses_other_rows(self):
    slots = np.array([1.0, 2, 3, 4, 5, 6])
    no = 0 * slots
    rows = np.column_stack([slots, no + 1, slots**2, no, no, 9 - slots])
    ((fixed, per_slot, per_token),) = simulate.fit(rows).decode
    assert fixed > 0 and per_slot == per_token == 0
    for shape in ((5, 6), (9, 4), (9,)):
      with pytest.raises(ValueError, match="decode_calls must have 6 columns"):
        simulate.fit(np.ones(shape))

  def test_an_accelerator_reads_or_multiplies(self):
    cost = simulate.accelerator(
      **{"devices": 2, "parameters": 1e9, "bytes_per_parameter": 2},
      **{"kv_bytes_per_token": 1e4, "flops_per_pair": 1e5, "bandwidth": 1e12},
      **{"peak_flops": 1e14, "bandwidth_use": 0.5, "flops_use": 0.5},
      **{"step_latency_s": 1e-3, "train_forwards": 3, "train_latency_s": 0.0},
      sync_bandwidth=1e9,
    )
    # 10 tokens attend to 55 positions; training is three times that.
    prefill = (10 * 2e9 + 55 * 1e5) / 1e14
    found = cost.prefill_s([10], calls=0), cost.train_s([10]), cost.sync_s
    assert found == pytest.approx((prefill, 3 * prefill, 2.0))
    # Few slots: 2 GB of weights and 1 GB of KV cache per device at 500 GB/s.
    assert cost.decode_s(2, 2e5) == pytest.approx(1e-3 + 3e9 / 5e11)
    # Many slots: 2 GFLOP per slot at 50 TFLOP/s, half of them on each device.
    assert cost.decode_s(1000, 0) == pytest.approx(1e-3 + 500 * 2e9 / 5e13)

  def test_prices_by_default_are_those_of_the_documented_tables(self):
    page = pathlib.Path(script.__file__).parents[1] / "docs" / "simulation.md"
    assert script.describe(simulate.accelerator()) in page.read_text()

  def test_dividing_devices_divides_what_is_spread_over_them(self):
    six, two = (simulate.accelerator(devices=devices) for devices in (6, 2))
    parted = simulate.accelerator(devices=6, train_devices=2)
    assert parted.decode_s(9, 1e6) == six.decode_s(9, 1e6)
    assert parted.prefill_s([99], 1) == six.prefill_s([99], 1)
    assert parted.train_s([99]) == two.train_s([99])


class TestLengths:
  def test_lognormal_has_the_median_and_the_tail_that_were_asked_for(self):
    lengths = simulate.lognormal(
      4000, 4, median=100, p99=800, maximum=1000, between=0.5, seed=0
    )
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    assert np.quantile(lengths, 0.99) == pytest.approx(800, rel=0.08)
    assert 1 <= lengths.min() and lengths.max() == 1000
    logs = np.log(lengths)
    share = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert share == pytest.approx(0.5, abs=0.06)

  def test_resample_draws_from_the_trace(self):
    lengths = simulate.resample([3, 5, 9], 50, 4, seed=1)
    assert set(lengths.flat) == {3, 5, 9}
    assert lengths.shape == (50, 4)
    with pytest.raises(ValueError, match="trace"):
      simulate.resample([], 2, 2, seed=0)


class TestScript:
  small = ["--median=20", "--max=90", "--p99=2,4", "--slots=8", "--groups=6"]
  small += ["--group_size=2", "--steps=4", "--prompt_length=5"]

  def test_writes_tables_and_a_picture(self, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    np.save(tmp_path / "lengths.npy", np.arange(1, 60))
    for flags in (
      (),
      (f"--lengths={tmp_path}/lengths.npy", "--assume=scheduler_step_s=0.5"),
    ):
      assert script.main([*self.small, *flags, f"--out={tmp_path}"]) == 0
      printed = capsys.readouterr().out
      assert ("lengths.npy" in printed) == bool(flags)
      for name in (
        *("simulated", "static", "refill", "window", "periodic", "fixed lag 2"),
        *("fixed lag 4, over-provisioned 1.5", "free-running, lag 1"),
      ):
        assert printed.count(f"| {name} |") == 1 + (not flags)
      table = (tmp_path / "table.md").read_text()
      assert "simulated" in table
      assert ("scheduler_step_s 0.5" in table) == bool(flags)
    assert (tmp_path / "schedules.png").stat().st_size > 10_000
