"""Tests of jaxrl_llm.simulate and scripts/simulate.py."""

import dataclasses
import importlib.util
import math
import pathlib

import numpy as np
import pytest
from helpers import scripted

from jaxrl_llm import simulate
from jaxrl_llm.sampling import rules
from jaxrl_llm.simulate import Plane, Requests, Setting

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_FREE = simulate.CostModel(decode=(Plane(1.0, 0.0, 0.0),))
# A step of n slots takes 10 + n seconds.
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
  """One response to each prompt."""
  lengths = np.array(lengths)[:, None]
  return Requests(np.full(len(lengths), prompt), lengths)


def _drawn(prompts=60, group_size=4, seed=0, **changes):
  settings = {
    "median": 30,
    "p99": 200,
    "maximum": 250,
    "prompt_length": 9,
    "between": 0.5,
  }
  return simulate.lognormal(
    prompts, group_size, seed=seed, **settings | changes
  )


_SETTING = Setting(slots=16, groups=10, steps=6, page_size=16)
_MODES = {
  "static": simulate.static,
  "refill": simulate.refill,
  "window": lambda *a: simulate.window(*a, window=40),
  "parked": lambda *a: simulate.over_provisioned(*a, in_flight=15),
  "dropped": lambda *a: simulate.over_provisioned(
    *a, in_flight=15, recycle=False
  ),
  "one step off": lambda *a: simulate.asynchronous(*a, lag=1),
  "unbounded": lambda *a: simulate.asynchronous(*a, lag=math.inf),
}
_EACH_MODE = pytest.mark.parametrize("mode", _MODES.values(), ids=_MODES)


class TestEveryMode:
  @_EACH_MODE
  def test_no_token_is_lost(self, mode):
    trace = mode(_drawn(), _PRICES, _SETTING)
    kept = trace.trained.sum() + trace.parked + trace.thrown_away.sum()
    assert trace.generated.sum() == kept
    assert np.all(trace.responses > 0)

  @_EACH_MODE
  def test_repeats_itself(self, mode):
    first, second = (mode(_drawn(), _PRICES, _SETTING) for _ in range(2))
    for name, value in vars(first).items():
      np.testing.assert_array_equal(value, vars(second)[name])

  @_EACH_MODE
  def test_the_parts_of_a_step_add_up(self, mode):
    trace = mode(_drawn(), _PRICES, _SETTING)
    parts = trace.generate_s + trace.prefill_s + trace.sync_s + trace.idle_s
    if mode not in (_MODES["one step off"], _MODES["unbounded"]):
      parts = parts + trace.train_s
    np.testing.assert_allclose(trace.wall_s, parts, rtol=1e-12)

  @_EACH_MODE
  def test_equal_lengths_keep_all_slots_busy(self, mode):
    requests = Requests(np.full(60, 9), np.full((60, 4), 32))
    setting = _SETTING._replace(groups=12, steps=4)
    trace = mode(requests, _PRICES, setting)
    assert trace.utilisation == pytest.approx(1.0)

  @_EACH_MODE
  def test_memory_follows_what_is_in_the_slots(self, mode):
    trace = mode(_drawn(), _PRICES, _SETTING)
    assert np.all(trace.peak_kv_capacity >= 16 * 16)
    # A response is at most 259 long: 17 pages.
    assert np.all(trace.peak_kv_capacity <= 16 * 17 * 16)


class TestByHand:
  """Three slots, prompts of 4 tokens, prices of whole and half seconds."""

  lengths = _single(2, 4, 3, 1, 5, 2)
  setting = Setting(slots=3, groups=6, steps=1, page_size=64)

  def _check(self, trace, **expected):
    for name, value in expected.items():
      np.testing.assert_allclose(vars(trace)[name], value, err_msg=name)

  def test_static(self):
    # 2, 4, 3 and then 1, 5, 2: 13 13 12 11, 13 12 11 11 11.
    self._check(
      simulate.static(self.lengths, _PRICES, self.setting),
      generate_s=[107],
      decode_steps=[9],
      prefill_s=[2 * (2 + 6)],
      train_s=[3 + 41 / 4],
      sync_s=[5],
      idle_s=[4 * 0.5],  # Where a slot became free, and at the end.
      wall_s=[143.25],
      responses=[6],
      peak_kv_capacity=[3 * 64],
    )

  def test_refill(self):
    # 2 steps of 2 4 3; 1 of 4 3 1; 5 of 4 5 2, of which one has 1 left.
    self._check(
      simulate.refill(self.lengths, _PRICES, self.setting),
      generate_s=[26 + 13 + 58],
      decode_steps=[8],
      prefill_s=[(2 + 6) + (2 + 2) + (2 + 4)],
      idle_s=[3 * 0.5],
      wall_s=[97 + 18 + 1.5 + 13.25 + 5],
    )

  def test_window(self):
    setting = self.setting._replace(groups=3, steps=3)
    self._check(
      simulate.window(self.lengths, _PRICES, setting, window=2),
      generate_s=[26, 24, 26],  # The last step starts over with 5, 2, 2.
      # Two that were cut, of 6 tokens and one at a time, and a new one.
      prefill_s=[2 + 6, 2 * 2 + 6 + 2 + 2, 2 + 6],
      generated=[6, 4, 6],
      trained=[6, 4, 6],
      train_s=[3 + 18 / 4, 3 + 20 / 4, 3 + 18 / 4],
      responses=[1, 3, 2],
      off_policy=[0, 0, 0],
    )

  def test_over_provisioned(self):
    setting = Setting(slots=3, groups=1, steps=2, page_size=2)
    trace = simulate.over_provisioned(
      _single(2, 4, 3), _PRICES, setting, in_flight=2
    )
    self._check(
      trace,
      generate_s=[24, 24],
      prefill_s=[2 + 4, (2 + 3) + (2 + 2)],
      trained=[2, 4],
      off_policy=[0, 2],
      max_staleness=[0, 1],
      parked=2,
    )

  def test_asynchronous(self):
    # Response: 4 prefill, 22 decoding, 0.5 host. Step: 4.5 training, 5 sync.
    setting = Setting(slots=1, groups=1, steps=2, page_size=2)
    trace = simulate.asynchronous(_single(2), _PRICES, setting, lag=1)
    self._check(
      trace,
      wall_s=[26.5 + 26.5 + 5, 26.5 + 5],
      train_s=[4.5, 4.5],
      off_policy=[0, 2],
      max_staleness=[0, 1],
      parked=2,
    )


class TestRefill:
  @pytest.mark.parametrize("slots", [5, 16])
  @pytest.mark.parametrize("seed", range(4))
  def test_is_never_slower_than_static(self, slots, seed):
    cost = simulate.CostModel(decode=(Plane(1.0, 0.1, 0.001),))
    setting = _SETTING._replace(slots=slots, steps=4)
    args = _drawn(seed=seed), cost, setting
    static, refill = simulate.static(*args), simulate.refill(*args)
    assert np.all(refill.wall_s <= static.wall_s * (1 + 1e-12))
    assert refill.wall_s.sum() < static.wall_s.sum()


class TestWindow:
  def test_of_the_longest_response_is_refill(self):
    requests = _drawn()
    longest = int(requests.lengths.max())
    window = simulate.window(requests, _PRICES, _SETTING, window=longest)
    refill = simulate.refill(requests, _PRICES, _SETTING)
    for name, value in vars(refill).items():
      np.testing.assert_array_equal(vars(window)[name], value, err_msg=name)

  def test_trains_prefixes_again_and_again(self):
    trace = simulate.window(_drawn(), _PRICES, _SETTING, window=20)
    contexts = (trace.train_s - 3) / 0.25
    assert contexts.sum() > 1.5 * trace.trained.sum()
    assert not trace.off_policy.any()


class TestOverProvisioned:
  def test_none_in_reserve_is_refill(self):
    args = _drawn(), _PRICES, _SETTING
    many = simulate.over_provisioned(*args, in_flight=_SETTING.groups)
    refill = simulate.refill(*args)
    for name, value in vars(refill).items():
      np.testing.assert_array_equal(vars(many)[name], value, err_msg=name)

  def test_parked_responses_go_first_and_grow_no_older_than_their_length(self):
    setting = _SETTING._replace(slots=80, steps=12)
    requests = _drawn(prompts=200)
    trace = simulate.over_provisioned(requests, _FREE, setting, in_flight=20)
    fewest = trace.decode_steps.min()
    assert trace.max_staleness.max() >= 1
    assert trace.max_staleness.max() <= -(-requests.lengths.max() // fewest)

  def test_waits_for_what_is_too_old(self):
    setting = _SETTING._replace(steps=12)
    args = _drawn(prompts=200, between=0.0), _FREE, setting
    ages = [
      simulate.over_provisioned(
        *args, in_flight=20, max_staleness=age
      ).max_staleness.max()
      for age in (1, math.inf)
    ]
    assert ages[0] == 1 < ages[1]

  def test_dropping_favours_short_responses_and_parking_does_not(self):
    requests = _drawn(prompts=800)
    setting = Setting(slots=80, groups=10, steps=40, page_size=16)
    args = requests, _FREE, setting
    whole = simulate.refill(*args).mean_length
    parked = simulate.over_provisioned(*args, in_flight=20)
    dropped = simulate.over_provisioned(*args, in_flight=20, recycle=False)
    assert dropped.mean_length < 0.8 * whole
    # What is still parked at the end is long; on the whole nothing is missing.
    assert parked.after(10).mean_length == pytest.approx(whole, rel=0.1)
    assert parked.off_policy_share > 0.1 and not dropped.off_policy.any()
    assert dropped.thrown_away.sum() > 0 and not parked.thrown_away.any()


class TestAsynchronous:
  def test_without_lag_it_takes_turns(self):
    args = _drawn(), _PRICES, _SETTING
    trace = simulate.asynchronous(*args, lag=0)
    refill = simulate.refill(*args)
    np.testing.assert_allclose(trace.wall_s, refill.wall_s)
    np.testing.assert_array_equal(trace.generated, refill.generated)
    assert not trace.off_policy.any()

  @pytest.mark.parametrize("lag", [1, 2, 3])
  @pytest.mark.parametrize("train_s", [1.0, 3000.0])
  def test_no_token_is_older_than_the_lag(self, lag, train_s):
    cost = dataclasses.replace(_PRICES, train_step_s=train_s)
    trace = simulate.asynchronous(
      _drawn(prompts=150), cost, _SETTING._replace(steps=12), lag=lag
    )
    assert 1 <= trace.max_staleness.max() <= lag

  def test_hides_training_behind_sampling(self):
    args = _drawn(), _PRICES, _SETTING
    refill = simulate.refill(*args)
    trace = simulate.asynchronous(*args, lag=1)
    assert trace.wall_s.sum() < refill.wall_s.sum()
    assert trace.wall_s.sum() >= trace.train_s.sum()

  def test_interrupted_responses_are_prefilled_again(self):
    free = dataclasses.replace(_FREE, prefill_token_s=1e-6)
    args = _drawn(), free, _SETTING
    trace = simulate.asynchronous(*args, lag=math.inf)
    assert trace.prefill_s.sum() > 2 * simulate.refill(*args).prefill_s.sum()


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
    stats = simulate.predict(
      [[len(scripted.response(prompt)[0])] for prompt in prompts],
      _FREE,
      prompt_lengths=[len(prompt) for prompt in prompts],
      slots=16,
      max_prompt_length=scripted.P,
      max_response_length=scripted.T,
      page_size=8,
      rule=rule,
    )
    for name in ("decode_calls", "decode_steps", "tokens"):
      assert getattr(stats, name) == getattr(engine.last_stats, name), name
    peak = max(call.kv_capacity for call in engine.trace)
    assert stats.peak_kv_capacity == peak

  def test_padded_prices_are_those_of_whole_programs(self):
    cost = simulate.CostModel(decode=(Plane(0.0, 1.0, 0.0),), padded=True)
    # 64 slots for one response of 10 tokens: at once the smallest batch, of 16.
    ask = {"prompt_lengths": [4], "slots": 64}
    assert simulate.predict([[10]], cost, **ask).seconds == 10 * 16
    # Of 64 responses all but 2 end at once.
    lengths = [[1]] * 62 + [[10]] * 2
    ask["prompt_lengths"] = [4] * 64
    assert simulate.predict(lengths, cost, **ask).seconds == 64 + 9 * 16

  @pytest.mark.parametrize(
    "lengths", [[3], [[0]], np.zeros((0, 4)), [[1], [2]]]
  )
  def test_refuses_what_is_no_grid_of_lengths(self, lengths):
    with pytest.raises(ValueError, match="lengths"):
      simulate.predict(lengths, _FREE, prompt_lengths=[3], slots=2)

  def test_refuses_to_branch(self):
    def forking(view):
      return rules.Decision(fork=[(0, 1)])

    with pytest.raises(ValueError, match="fork"):
      simulate.predict([[3]], _FREE, prompt_lengths=[3], slots=2, rule=forking)


class TestCosts:
  def test_fit_finds_the_prices_that_made_the_rows(self):
    rng = np.random.default_rng(0)
    slots, steps = rng.choice([4, 16, 64], 40), rng.integers(1, 65, 40)
    positions = rng.integers(1, 50, 40) * 512
    seconds = 0.01 + steps * (2e-3 + 1e-4 * slots + 1e-7 * positions)
    calls = rng.integers(1, 50, (10, 3))
    host = calls @ [3e-3, 2e-2, 1e-5]
    cost = simulate.fit(
      np.stack([slots, steps, positions, seconds], axis=1),
      np.column_stack([calls, host]),
    )
    np.testing.assert_allclose(cost.decode, [(2e-3, 1e-4, 1e-7)], rtol=1e-8)
    assert cost.scheduler_step_s == pytest.approx(0.013)
    assert cost.prefill_call_s == pytest.approx(2e-2)
    assert cost.prefill_token_s == pytest.approx(1e-5)
    assert cost.padded

  def test_fit_knows_no_negative_price(self):
    slots = np.array([1.0, 2, 3, 4, 5])
    rows = np.stack([slots, slots * 0 + 1, slots**2, 9 - slots], axis=1)
    ((fixed, per_slot, per_token),) = simulate.fit(rows).decode
    assert fixed > 0 and per_slot == per_token == 0

  @pytest.mark.parametrize("shape", [(3, 4), (9, 3), (9,)])
  def test_fit_refuses_other_rows(self, shape):
    with pytest.raises(ValueError, match="decode_calls must have 4 columns"):
      simulate.fit(np.ones(shape))

  def test_an_accelerator_reads_or_multiplies(self):
    cost = simulate.accelerator(
      devices=2,
      parameters=1e9,
      bytes_per_parameter=2,
      kv_bytes_per_token=1e4,
      flops_per_pair=1e5,
      bandwidth=1e12,
      peak_flops=1e14,
      bandwidth_use=0.5,
      flops_use=0.5,
      step_latency_s=1e-3,
      train_forwards=3,
      train_latency_s=0.0,
      sync_bandwidth=1e9,
    )
    # Few slots: 2 GB of weights and 1 GB of memory on each device at 500 GB/s.
    assert cost.decode_s(2, 2e5) == pytest.approx(1e-3 + 3e9 / 5e11)
    # Many: 2 GFLOP a slot at 50 TFLOP/s, half of the slots on each device.
    assert cost.decode_s(1000, 0) == pytest.approx(1e-3 + 500 * 2e9 / 5e13)
    # 10 tokens attend to 55 positions; training is three times that.
    prefill = (10 * 2e9 + 55 * 1e5) / 1e14
    assert cost.prefill_s([10], calls=0) == pytest.approx(prefill)
    assert cost.train_s([10]) == pytest.approx(3 * prefill)
    assert cost.sync_s == 2.0

  def test_dividing_devices_divides_what_is_spread_over_them(self):
    whole, half = (
      simulate.accelerator(devices=d, train_latency_s=0) for d in (8, 4)
    )
    parted = whole.divided(0.5)
    assert parted.decode_s(9, 1e6) == pytest.approx(half.decode_s(9, 1e6))
    assert parted.train_s([99]) == pytest.approx(half.train_s([99]))
    with pytest.raises(ValueError, match="sampler_share"):
      whole.divided(1.0)


class TestLengths:
  def test_lognormal_has_the_median_and_the_tail_that_were_asked_for(self):
    lengths = simulate.lognormal(
      4000,
      4,
      median=100,
      p99=800,
      maximum=1000,
      prompt_length=7,
      between=0.5,
      seed=0,
    ).lengths
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    assert np.quantile(lengths, 0.99) == pytest.approx(800, rel=0.08)
    assert 1 <= lengths.min() and lengths.max() == 1000
    logs = np.log(lengths)
    share = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    assert share == pytest.approx(0.5, abs=0.06)

  def test_resample_draws_from_the_trace(self):
    requests = simulate.resample([3, 5, 9], 50, 4, prompt_length=2, seed=1)
    assert set(requests.lengths.flat) == {3, 5, 9}
    assert requests.lengths.shape == (50, 4)
    with pytest.raises(ValueError, match="trace"):
      simulate.resample([], 2, 2, prompt_length=2, seed=0)


class TestScript:
  small = ["--median=20", "--max=90", "--p99=2,4", "--slots=8", "--groups=6"]
  small += ["--group_size=2", "--steps=4", "--prompt_length=5"]

  def _main(self):
    path = _ROOT / "scripts" / "simulate.py"
    spec = importlib.util.spec_from_file_location("simulate_script", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main

  def test_writes_tables_and_a_picture(self, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert self._main()([*self.small, f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("| simulated |") == 2
    for name in ("static", "refill", "window", "asynchronous, lag 1"):
      assert printed.count(f"| {name} |") == 2
    assert "simulated" in (tmp_path / "table.md").read_text()
    assert (tmp_path / "schedules.png").stat().st_size > 10_000

  def test_takes_measured_windows_and_lengths(self, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    windows, lengths = tmp_path / "windows.csv", tmp_path / "lengths.npy"
    windows.write_text("".join(f"8,{n},512,{0.1 * n}\n" for n in range(1, 9)))
    np.save(lengths, np.arange(1, 60))
    flags = [f"--measured={windows}", f"--lengths={lengths}", "--cost=cpu"]
    flags += ["--assume=train_token_s=0.5"]
    assert self._main()([*self.small, *flags, f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "lengths.npy" in printed and "asynchronous" not in printed
    assert "train_token_s 0.5" in (tmp_path / "table.md").read_text()

  @pytest.mark.parametrize(
    "flags, said",
    [
      (["--slots=0"], "--slots=0"),
      (["--median=x"], "'x' is no number"),
      (["--median=5,9"], "belong together"),
      (["--cost=cpu"], "--measured"),
      (["--cost=cpu", "--measured=nowhere.csv"], "nowhere.csv"),
      (["--lengths=nowhere.npy"], "nowhere.npy"),
      (["--assume=wheels=4"], "bandwidth"),
      (["--assume=devices=none"], "'none' is no number"),
      (["--assume=devices=0"], "above 0"),
      (["--p99=inf"], "--p99"),
      (["--p99=0.5"], "--p99"),
      (["--window=2"], "--window"),
    ],
  )
  def test_bad_input_is_one_line(self, flags, said, tmp_path, capsys):
    code = self._main()([*self.small, *flags, f"--out={tmp_path}"])
    error = capsys.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1
