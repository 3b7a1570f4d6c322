"""The detector of broken hosts: its parts, then simulated fleets."""

import jax
import numpy as np
import pytest
from helpers import denoiser

from jaxrl_llm import fleet
from jaxrl_llm.errors import InputError
from jaxrl_llm.fleet import scores

_NAN = np.nan


def noise(hosts=6, seconds=600, metrics=3, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal((hosts, seconds, metrics)).astype(np.float32)


def broken(host=2, metric=1, onset=200, size=6.0, **of_noise):
  x = noise(**of_noise)
  x[host, onset:, metric] += size
  return x


def detected(x, **how):
  return [(alarm.host, alarm.metric) for alarm in fleet.detect(x, **how)]


class TestFillGaps:
  def test_takes_the_nearest_sample(self):
    x = np.array([_NAN, 1, _NAN, _NAN, _NAN, 5, _NAN])
    filled = fleet.fill_gaps(x[None, :, None])[0, :, 0]
    np.testing.assert_array_equal(filled, [1, 1, 1, 1, 5, 5, 5])

  def test_a_host_that_sent_nothing_is_like_the_median(self):
    x = noise(hosts=4, seconds=5)
    x[3, :, 1] = np.nan
    filled = fleet.fill_gaps(x)
    np.testing.assert_allclose(filled[3, :, 1], np.median(x[:3, :, 1], axis=0))
    x[:, :, 1] = np.nan
    assert np.all(fleet.fill_gaps(x)[..., 1] == 0)

  def test_leaves_what_is_whole(self):
    np.testing.assert_array_equal(fleet.fill_gaps(noise()), noise())


class TestDistances:
  def test_a_far_one_is_the_farthest_of_all_pairs(self):
    # One far from healthy ones.
    for seed in range(50):
      rng = np.random.default_rng(seed)
      points = rng.standard_normal((40, 8))
      points[rng.integers(40)] += 4 * rng.standard_normal(8)
      pairs = np.linalg.norm(points[:, None] - points[None], axis=-1).sum(1)
      assert scores.distances(points).argmax() == pairs.argmax()

  def test_of_two_groups_at_once(self):
    points = np.random.default_rng(0).standard_normal((5, 3, 2))
    by_hand = [
      [np.hypot(*(p - np.median(points[:, t], axis=0))) for p in points[:, t]]
      for t in range(3)
    ]
    np.testing.assert_allclose(scores.distances(points).T, by_hand)


class TestMedianScores:
  def test_is_the_change_in_standard_deviations_of_a_second(self):
    x = 3 * noise(hosts=9, seconds=400, metrics=1)
    x += np.random.default_rng(1).uniform(-200, 200, (9, 1, 1))
    x[1, 300:] += 18
    found = fleet.median_scores(x)[..., 0]
    assert found.shape == (69, 9)  # At 60 s, 65 s, ... 400 s.
    assert found[-1, 1] == pytest.approx(6, rel=0.1)
    assert np.delete(found, 1, axis=1).max() < 1 and found[:49].max() < 1

  def test_a_level_of_the_first_minutes_is_not_new(self):
    x = noise(hosts=9, metrics=1)
    x[0, :50] += 4
    x[0, 300:] += 4
    x[3, 300:] += 4
    end = fleet.median_scores(x)[-1, :, 0]
    assert end[0] < 1 and end[3] == pytest.approx(4, rel=0.15)

  @pytest.mark.parametrize("level", [0, 50])
  def test_units_do_not_count(self, level):
    x = broken() + np.float32(level)
    scaled = x * [1e-3, 1.0, 1e6]
    assert detected(1e-12 * x.astype(np.float64)) == [(2, 1)]
    np.testing.assert_allclose(
      fleet.median_scores(x), fleet.median_scores(scaled), rtol=1e-2, atol=1e-2
    )

  def test_what_all_do_does_not_count(self):
    x = broken().astype(np.float64)
    common = 50 * np.sin(np.arange(600) / 7)[:, None] * [1, 2, 3]
    assert detected(x + common) == [(2, 1)]
    healthy = np.delete(x, 2, axis=0) + common
    assert fleet.median_scores(healthy).max() < 1

  def test_a_metric_that_stands_still_has_no_suspect(self):
    assert np.all(fleet.median_scores(np.ones((4, 100, 1))) == 0)

  @pytest.mark.parametrize("level", [-47.0, 47.0])
  def test_ticks_of_a_coarse_metric_are_no_change(self, level):
    x = np.full((5, 900, 1), level)
    for host, second in ((0, 300), (2, 450), (4, 500)):
      x[host, second:] += 0.1  # A disk that fills up, in tenths of a percent.
    assert fleet.detect(x) == []
    x[1, 400:] += 1.0
    assert detected(x) == [(1, 0)]

  def test_any_change_counts_where_all_others_stand_still(self):
    x = np.full((5, 600, 1), 47.0)
    x[1, 200:] = 48.0
    assert detected(x) == [(1, 0)]


class TestWatch:
  def looks(self, *suspects, hold_s=20.0):
    """Returns alarms for checks every 10 seconds; None means no suspect."""
    since, alarms = np.full((4, 1), np.nan), []
    for i, suspect in enumerate(suspects):
      found = np.zeros((4, 1))
      if suspect is not None:
        found[suspect] = 3.0
      since, raised = fleet.watch(
        since, found, 10.0 * i, threshold=2.0, hold_s=hold_s
      )
      alarms.append([a.host for a in raised])
    return alarms

  def test_takes_long_enough_without_a_break(self):
    assert self.looks(1, 1, 1, 1) == [[], [], [1], [1]]
    assert self.looks(1, 1, None, 1, 1) == [[]] * 5
    assert self.looks(1, 1, 2, 2, 2) == [[], [], [], [], [2]]

  def test_a_suspicion_lasts_down_to_a_share_of_the_threshold(self):
    since, alarms = np.full((1, 1), np.nan), []
    for now, score in enumerate([1.9, 2.1, 1.6, 1.6, 1.4]):
      since, raised = fleet.watch(
        since, np.array([[score]]), float(now), threshold=2.0, hold_s=2.0
      )
      alarms.append([(a.since, a.until) for a in raised])
    assert alarms == [[], [], [], [(1.0, 3.0)], []]

  def test_tells_since_when(self):
    since = np.full((4, 2), np.nan)
    since[3, 1] = 50.0
    before = since.copy()
    found = np.array([[0, 0], [0, 0], [5.0, 0], [0, 5.0]])
    _, (alarm,) = fleet.watch(since, found, 90.0, threshold=2.0, hold_s=40.0)
    wanted = {"since": 50.0, "until": 90.0, "score": 5}
    assert alarm == fleet.Alarm(host=3, metric=1, **wanted)
    np.testing.assert_array_equal(before, since)


class TestDetect:
  def test_names_the_host(self):
    (alarm,) = fleet.detect(broken())
    assert (alarm.host, alarm.metric) == (2, 1)
    # Half of the minute's mean suffices; then four uninterrupted minutes.
    assert 200 <= alarm.since <= 260 and 240 <= alarm.until - alarm.since <= 250
    assert fleet.detect(noise()) == []
    assert fleet.detect(broken()[:, :400]) == []  # Not long enough yet.
    assert fleet.detect(broken()[:, :400], hold_s=60)[0].host == 2

  def test_the_order_of_hosts_does_not_count(self):
    assert detected(broken()[::-1]) == [(3, 1)]

  def test_names_the_metric_that_tells_most(self):
    x = noise()
    x[2, 100:] += 60.0  # All metrics exceed the threshold at once.
    for names, first in (
      (["disk", "gpu_power", "cpu_usage"], "cpu_usage"),
      (["disk", "fan", "gpu_power"], "gpu_power"),
      (["disk", "fan", "load"], "disk"),
      (None, 0),
    ):
      assert detected(x, metrics=names) == [(2, first)]

  def test_refuses_names_that_do_not_fit(self):
    x = noise()
    for given in [(x, ["disk"]), (x, None, ["a"]), (x[0],), (x[:, :0],)]:
      with pytest.raises(InputError, match="give .hosts, seconds, metrics"):
        fleet.detect(*given)

  @pytest.mark.parametrize("broken_host", [0, 3])
  def test_lasting_differences_neither_alarm_nor_hide_a_fault(
    self, broken_host
  ):
    x = noise(seconds=900)
    bias = np.random.default_rng(5).uniform(-60, 60, (6, 1, 3))
    x += bias.astype(np.float32)
    assert fleet.detect(x) == []
    x[broken_host, 400:, 2] += 5.0
    (alarm,) = fleet.detect(x)
    assert (alarm.host, alarm.metric) == (broken_host, 2)
    assert 400 <= alarm.since <= 460 and alarm.until <= 710

  def test_a_difference_that_ends_is_a_fault(self):
    x = noise()
    x[1, :250, 0] += 20.0
    (alarm,) = fleet.detect(x)
    assert alarm.host == 1 and alarm.since >= 250

  def test_a_growing_difference_is_a_fault(self):
    x = noise(seconds=900)
    x[1, 300:, 0] += np.linspace(0, 8, 600)
    assert detected(x) == [(1, 0)]

  def test_hosts_that_drift_apart_are_healthy(self):
    x = noise(hosts=12, seconds=900)
    slopes = np.random.default_rng(2).normal(0, 3, (12, 1, 3))
    x += (slopes * np.linspace(0, 1, 900)[:, None]).astype(np.float32)
    assert fleet.detect(x) == []

  def test_a_burst_in_the_first_minutes_is_healthy(self):
    x = noise(seconds=900)
    x[1, 30:120, 0] += 8.0
    assert fleet.detect(x) == []

  def test_returns_every_broken_host_once(self):
    x = noise(hosts=12, seconds=900)
    x[2, 250:] -= 6.0
    x[7, 200:, 1] += 5.0
    x[9, 400:, 1] += 5.0
    assert [host for host, _ in detected(x)] == [7, 2, 9]

  def test_hosts_far_below_the_highest_score_follow_it(self):
    x = noise(hosts=12, seconds=900)
    x[2, 250:] -= 20.0
    x[7, 200:, 1] += 5.0  # Begins earlier, with a peer's idle hands.
    assert [host for host, _ in detected(x)] == [2]

  def test_a_large_fault_in_the_first_minutes_is_found(self):
    assert detected(broken(onset=100, size=40)) == [(2, 1)]

  def test_a_frozen_metric_is_a_fault(self):
    x = noise()
    x[4, 200:, 1] = 0.1  # Its level is unchanged.
    assert detected(x) == [(4, 1)]

  def test_a_restless_metric_is_a_fault(self):
    x = noise()
    x[4, 200:, 1] *= 8.0  # Around the same level.
    assert detected(x) == [(4, 1)]

  def test_a_metric_whose_samples_get_lost_is_a_fault(self):
    x = noise()
    x[4, 200:, 1][np.random.default_rng(3).random(400) < 0.6] = np.nan
    assert detected(x) == [(4, 1)]

  @pytest.mark.parametrize("share", [0.8, 1.0])
  def test_a_host_that_stops_sending_is_a_fault(self, share):
    x = noise()
    lost = np.random.default_rng(3).random(400) < share
    x[4, 200:][lost] = np.nan
    assert [host for host, _ in detected(x)] == [4]

  def test_roles_are_compared_apart(self):
    x = noise(hosts=8)
    roles = ["trainer"] * 4 + ["sampler"] * 4
    x[4:] += 50.0  # Another workload.
    x[5, 200:, 0] -= 8.0
    assert detected(x, roles=roles) == [(5, 0)]
    x[1, 200:, 0] -= 5.0  # The highest score of another role hides nobody.
    assert sorted(detected(x, roles=roles)) == [(1, 0), (5, 0)]

  def test_two_hosts_are_not_compared(self):
    x = broken(hosts=5)
    assert fleet.detect(x[:2] * [1, 50, 1]) == []
    assert fleet.detect(x, roles=["a", "b", "b", "c", "c"]) == []


class TestJobs:
  """Metrics in physical units, whose hosts differ by factors."""

  def job(self, idle=(), hosts=16, **of_noise):
    """Draws power, network and duty, with seconds in which the job is idle."""
    rng = np.random.default_rng(7)
    busy, rest = np.array([560.0, 92.0, 98.0]), np.array([185.0, 0.1, 0.0])
    x = np.full((900, 3), busy)
    x[list(idle)] = rest
    x = x * (1 + 0.03 * noise(hosts=hosts, seconds=900, **of_noise))
    return x * rng.uniform(0.85, 1.15, (hosts, 1, 3))

  @pytest.mark.parametrize("hosts", [4, 16, 128])
  @pytest.mark.parametrize(
    "idle",
    [range(500, 900), range(300), range(400, 520), range(60, 240)],
    ids=["stops", "begins", "pauses", "restarts early"],
  )
  def test_a_job_that_stops_or_starts_names_nobody(self, hosts, idle):
    assert fleet.detect(self.job(idle, hosts)) == []

  def test_names_only_the_host_because_of_which_the_job_stops(self):
    x = self.job(range(560, 900))
    x[3, 250:, 0] *= 0.5
    assert detected(x, metrics=["gpu_power", "net", "duty"]) == [
      (3, "gpu_power")
    ]

  def test_what_differs_in_an_idle_job_as_well_is_found(self):
    x = self.job(range(300, 900))  # 50 s of work.
    x[3, 250:, 0] *= 0.4
    assert detected(x) == [(3, 0)]

  @pytest.mark.parametrize(("seconds", "found"), [(100, []), (180, [(3, 1)])])
  def test_minutes_before_a_stop_count_where_nobody_has_any_traffic(
    self, seconds, found
  ):
    x = self.job(range(250 + seconds, 900))
    x[3, 250:, 1] *= 0.4
    assert detected(x) == found

  @pytest.mark.parametrize(("size", "found"), [(0.15, []), (0.3, [(5, 0)])])
  @pytest.mark.parametrize("sign", [-1, 1])
  def test_differences_that_begin_count_beyond_those_of_other_hosts(
    self, size, sign, found
  ):
    x = self.job()
    x[5, 300:, 0] *= 1 + sign * size
    assert detected(x) == found

  def test_a_start_after_a_pause_may_change_the_differences(self):
    x = self.job(range(300, 420))
    rng = np.random.default_rng(8)
    x[:, 420:, 1] *= 1 + rng.uniform(-0.2, 0.2, (16, 1))
    assert fleet.detect(x) == []
    x[5, 420:] *= 0.3
    assert [host for host, _ in detected(x)] == [5]

  def test_peers_to_which_a_fault_spreads_are_not_named(self):
    x = self.job()
    x[[4, 6, 7], 320:, 1] *= 0.7
    x[5, 300:, 1] *= 0.2
    assert detected(x) == [(5, 1)]

  @pytest.mark.parametrize("share", [0.001, 0.02])
  def test_a_value_that_is_repeated_is_frozen(self, share):
    x = 67.0 * (1 + share * noise(hosts=8, seconds=900, metrics=1))
    assert fleet.detect(x) == []
    x[3, 400:] = x[3, 400]
    assert detected(x) == [(3, 0)]

  @pytest.mark.parametrize("value", [753.0, 1e19])
  @pytest.mark.parametrize("share", [0, 0.001])
  def test_a_glitch_neither_alarms_nor_hides_a_fault(self, value, share):
    x = 66.7 * (1 + share * noise(hosts=8, seconds=900, metrics=1))
    x[2, [66, 100]] = value
    x[6, 95:99] = value
    assert fleet.detect(x) == []
    x[2, 300:] -= 20
    assert detected(x) == [(2, 0)]

  def test_a_metric_at_its_limit_is_not_frozen(self):
    x = self.job(hosts=8)
    x[1, 400:, 2] *= 1.15
    assert fleet.detect(np.minimum(x, 98)) == []

  @pytest.mark.parametrize("hosts", [32, 512])
  def test_of_many_hosts_one_is_always_the_farthest(self, hosts):
    x = noise(hosts=hosts, seconds=900, metrics=2)
    slopes = np.random.default_rng(0).standard_t(8, (hosts, 1, 2))
    x += (1.5 * slopes * np.linspace(0, 1, 900)[:, None]).astype(np.float32)
    assert fleet.detect(x) == []


class TestDenoiser:
  def test_takes_noise_away(self):
    windows = denoiser.cut(denoiser.standardized(noise(hosts=16)))
    params = denoiser.fit(jax.random.key(0), windows, steps=200, batch=128)
    x = denoiser.standardized(noise(hosts=8, seed=7))
    windows = denoiser.cut(x).transpose(2, 0, 1)
    clean = np.asarray(denoiser._reconstruct(params, windows))
    assert clean.shape == windows.shape
    assert clean.var() < 0.7 * windows.var()
    # The remainder is specific to the window: its level.
    levels = np.corrcoef(clean.mean(-1).ravel(), windows.mean(-1).ravel())[0, 1]
    assert levels > 0.6


class TestSlowHosts:
  def slow(self, x):
    return fleet.slow_hosts(x, x.sum(axis=2), roles=["a"] * len(x))

  def seconds(self, hosts=5, steps=20, slow=()):
    rng = np.random.default_rng(0)
    x = np.array([2.0, 1.0, 0.01]) * rng.uniform(0.9, 1.1, (hosts, steps, 3))
    for host, first, phase in slow:
      x[host, first:, phase] *= 2
    return x

  def test_twice_as_slow_is_named_within_half_a_minute(self):
    x = self.seconds(slow=[(3, 10, 0)])
    # A step takes the slow host 5 s, four steps take 20 s.
    assert self.slow(x[:, :13]) == []
    (alarm,) = self.slow(x[:, :15])
    assert (alarm.host, alarm.metric) == (3, 0)
    assert alarm.score == pytest.approx(2, rel=0.15)
    assert 20 <= alarm.until - alarm.since <= 30

  def test_three_long_steps_are_not_enough(self):
    x = 20 * self.seconds(slow=[(3, 17, 0)])
    assert self.slow(x) == []
    assert self.slow(20 * self.seconds(slow=[(3, 16, 0)]))[0].host == 3

  def test_a_long_phase_of_the_last_step_hides_no_other(self):
    x = self.seconds(slow=[(3, 10, 0)])
    x[3, -1, 1] *= 5
    (alarm,) = self.slow(x)
    assert (alarm.host, alarm.metric) == (3, 0)

  def test_steps_in_lockstep_are_equally_long(self):
    own = self.seconds(slow=[(3, 10, 1)])  # Without waiting: 1 s, then 2 s.
    steps = np.full(own.shape[:2], 10.0)
    (alarm,) = fleet.slow_hosts(own, steps, roles=["a"] * 5)
    assert (alarm.host, alarm.metric) == (3, 1)
    # It is less than a twentieth of a one-minute step.
    assert fleet.slow_hosts(own, 6 * steps, roles=["a"] * 5) == []

  def test_healthy_ones_and_tiny_phases_are_not(self):
    assert self.slow(self.seconds()) == []
    assert self.slow(self.seconds(slow=[(1, 0, 2)])) == []
    assert self.slow(self.seconds(hosts=2, slow=[(1, 0, 0)])) == []
