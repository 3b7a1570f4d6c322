"""Weights that go wrong on their way: found within a step of a real run."""

import contextlib
import dataclasses

import pytest
import tiny_mesh_run
import tiny_run
from tiny_mesh_run import Spy, recorded, with_config

from jaxrl_llm import checkpoint, sharding, sync
from jaxrl_llm.train import build, loop, runstate

WRONG = 2  # The version whose sync goes wrong.


@pytest.fixture(scope="module")
def make_job(tmp_path_factory):
  """name of MESHES -> job; each is built and compiled once."""
  model = tiny_run.write_model(tmp_path_factory.mktemp("model") / "tiny")
  return tiny_mesh_run.job_maker(model)


def _skipped(link, job, params, version, old):
  return old


def _bumped(link, job, params, version, old):
  return dataclasses.replace(old, version=version)


def _reference(link, job, params, version, old):
  return link.push(build.load_policy_params(job), version)


def _stale(link, job, params, version, old):
  """One leaf does not arrive."""
  new = link.push(params, version)
  final_norm = old.params["final_norm"]
  return dataclasses.replace(
    new, params=new.params | {"final_norm": final_norm}
  )


def _stale_and_stamped(link, job, params, version, old):
  """One leaf was never sent; the stamp fits what is there."""
  return sync.stamp(_stale(link, job, params, version, old).params, version)


def mutated(job, mutation):
  """The job, whose sync after step WRONG is the given one."""

  def push(params, version, replaces=None):
    if version == WRONG:
      return mutation(job.link, job, params, version, replaces)
    return job.link.push(params, version, replaces)

  return dataclasses.replace(job, link=Spy(job.link, push=push))


class TestMutations:
  """Each goes wrong in the sync after step 2; no step 3 may be sampled."""

  @pytest.mark.parametrize("name", ["shared", "apart"])
  @pytest.mark.parametrize(
    ("mutation", "message"),
    [
      (_skipped, "holds version 1, but the trainer is at version 2"),
      (_bumped, "\\(every leaf\\) .* at version 2, .* but of version 1:"),
      (_reference, "\\(every leaf\\) of the sampler is not the trainer's at"),
      (
        _stale,
        "^final_norm/scale \\(1 of .* leaves\\) .* but of version 1, and not"
        " what was stamped",
      ),
      (
        _stale_and_stamped,
        "^final_norm/scale \\(1 of .* leaves\\) .* but of version 1: push",
      ),
    ],
  )
  def test_each_is_found_within_a_step(
    self, make_job, tmp_path, name, mutation, message
  ):
    job, rollouts = recorded(with_config(make_job(name), eval__every=4))
    with pytest.raises(sync.SyncError, match=message) as error:
      loop.train(mutated(job, mutation), tmp_path)
    assert "\n" not in str(error.value)
    rows = tiny_run.comparable(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, WRONG]
    assert len(rollouts) == 1 + WRONG  # An evaluation and two steps.

  def test_the_evaluation_is_guarded_too(self, make_job, tmp_path):
    job, rollouts = recorded(make_job("apart"))
    job = mutated(job, _bumped)  # An evaluation is due at WRONG.
    with pytest.raises(sync.SyncError, match="at version 2"):
      loop.train(job, tmp_path)
    assert len(rollouts) == 1 + WRONG

  def test_the_next_start_pushes_anew(self, make_job, tmp_path):
    job, broken = make_job("shared"), tmp_path / "broken"
    with pytest.raises(sync.SyncError):
      loop.train(mutated(job, _stale), broken)
    loop.train(job, broken)
    loop.train(job, tmp_path / "whole")
    assert tiny_run.comparable(broken) == tiny_run.comparable(
      tmp_path / "whole"
    )


def probed(job, refuse=None):
  """The job, and the versions that it probes; one of them may be refused."""
  versions = []

  def probe(params, weights):
    versions.append(weights.version)
    error = job.probe(params, weights)
    if weights.version == refuse:
      raise sync.SyncError("refused")
    return error

  return dataclasses.replace(job, probe=probe), versions


class TestProbe:
  @pytest.mark.parametrize("name", ["shared", "apart"])
  def test_passes_and_is_logged_when_due(self, make_job, tmp_path, name):
    job, versions = probed(with_config(make_job(name), sampler__probe_every=2))
    loop.train(job, tmp_path)
    assert versions == [0, 2, 4]
    errors = {
      row["step"]: row["sampler_trainer/probe_error"]
      for row in tiny_run.comparable(tmp_path)
      if "sampler_trainer/probe_error" in row
    }
    assert list(errors) == versions
    assert all(0 <= error <= 1e-6 for error in errors.values())

  def test_a_resumed_run_is_probed_at_its_start(self, make_job, tmp_path):
    job, versions = probed(with_config(make_job("apart"), run__steps=2))
    loop.train(job, tmp_path)
    loop.train(with_config(job, run__steps=3), tmp_path)
    assert versions == [0, 2]
    with contextlib.closing(
      checkpoint.Checkpointer(tmp_path / "checkpoints", keep=2)
    ) as saver:
      assert runstate.resume(job, saver, 3).sampler.version == 3

  def test_is_off_at_zero(self, make_job, tmp_path):
    job, versions = probed(
      with_config(make_job("shared"), sampler__probe_every=0, run__steps=2)
    )
    loop.train(job, tmp_path)
    assert versions == []
    rows = tiny_run.comparable(tmp_path)
    assert not any("sampler_trainer/probe_error" in row for row in rows)

  def test_a_refusal_stops_the_run_before_the_next_sample(
    self, make_job, tmp_path
  ):
    job, rollouts = recorded(make_job("shared"))
    job, _ = probed(with_config(job, sampler__probe_every=WRONG), WRONG)
    with pytest.raises(sync.SyncError, match="refused"):
      loop.train(job, tmp_path)
    assert len(rollouts) == 1 + WRONG

  def test_a_sampler_that_means_something_else_writes_nothing(
    self, make_job, tmp_path
  ):
    job, rollouts = recorded(make_job("apart"))
    fns = job.policy.fns

    def shifted(params, memory, pages, tokens, positions, writing):
      return fns.decode(params, memory, pages, tokens, positions // 2, writing)

    probe = sync.make_probe(
      fns._replace(decode=shifted),
      sync.probe_tokens(fns.config.vocab_size, rows=4, length=9),
      tolerance=1e-5,
      page_length=4,
      sharding=sharding.along_batch(job.sampler_mesh),
    )
    with pytest.raises(sync.SyncError, match="version 0 differ"):
      loop.train(dataclasses.replace(job, probe=probe), tmp_path)
    assert not rollouts and not tiny_run.comparable(tmp_path)
