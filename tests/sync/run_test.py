"""Corrupted weight transfers are detected within a step of a real run."""

import contextlib
import dataclasses

import pytest
from helpers import tiny_mesh_run, tiny_run
from helpers.tiny_mesh_run import Spy, recorded
from helpers.tiny_run import with_config

from jaxrl_llm import checkpoint, sync
from jaxrl_llm.trainer import loop

WRONG = 2  # The version whose transfer goes wrong.


@pytest.fixture(scope="module")
def make_run(model):
  """Name in MESHES -> run, each built and compiled once."""
  return tiny_mesh_run.run_maker(model)


def _skipped(transfer, run, params, version, old):
  return old


def _reference(transfer, run, params, version, old):
  return transfer.send(run.learner.initial_params(), version)


def _stale(transfer, run, params, version, old):
  """One leaf does not arrive."""
  new = transfer.send(params, version)
  final_norm = old.params["final_norm"]
  return dataclasses.replace(
    new, params=new.params | {"final_norm": final_norm}
  )


def mutated(run, mutation):
  """Returns the run with another transfer after step WRONG."""

  def send(params, version, replaces=None):
    if version == WRONG:
      return mutation(run.transfer, run, params, version, replaces)
    return run.transfer.send(params, version, replaces)

  transfer = Spy(run.transfer, send=send)
  return dataclasses.replace(run, transfer=transfer)


class TestMutations:
  """The transfer after step 2 is corrupted; step 3 must not be sampled."""

  @pytest.mark.parametrize(
    ("mutation", "message"),
    [
      (_reference, "\\(every leaf\\) of the sampler differs"),
      (
        _stale,
        "^final_norm/scale \\(1 of .* leaves\\) .* at version 2, and also"
        " differs from what was sent",
      ),
    ],
  )
  def test_each_is_found_within_a_step(
    self, make_run, tmp_path, mutation, message
  ):
    run = with_config(
      make_run("shared"), eval__every=4, sampler__parity_check_every=1
    )
    run, rollouts = recorded(run)
    with pytest.raises(sync.SyncError, match=message) as error:
      loop.train(mutated(run, mutation), tmp_path)
    assert "\n" not in str(error.value)
    rows = tiny_run.comparable(tmp_path)
    assert [row["step"] for row in rows] == [0, 1]
    assert len(rollouts) == 1 + WRONG  # An evaluation and two steps.

  @pytest.mark.parametrize("every", [2, 4])
  def test_versions_are_compared_in_every_step(self, make_run, tmp_path, every):
    # WRONG is followed by an evaluation, or by a step.
    run, rollouts = recorded(with_config(make_run("apart"), eval__every=every))
    run = mutated(run, _skipped)
    with pytest.raises(sync.SyncError, match="holds version 1, .* version 2"):
      loop.train(run, tmp_path)
    assert len(rollouts) == 1 + WRONG

  @pytest.mark.slow
  def test_the_next_start_sends_anew(self, make_run, tmp_path):
    run, broken = make_run("shared"), tmp_path / "broken"
    run = with_config(run, sampler__parity_check_every=WRONG)
    with pytest.raises(sync.SyncError):
      loop.train(mutated(run, _stale), broken)
    loop.train(run, broken)
    loop.train(run, tmp_path / "whole")
    assert tiny_run.comparable(broken) == tiny_run.comparable(
      tmp_path / "whole"
    )


def checked(run, refuse=None):
  """Returns the run, and versions whose parity it checks; one may fail."""
  versions = []

  def check(params, weights):
    versions.append(weights.version)
    error = run.parity_check(params, weights)
    if weights.version == refuse:
      raise sync.SyncError("refused")
    return error

  return dataclasses.replace(run, parity_check=check), versions


def counted(run):
  """Returns the run, and a list that grows with every checksum comparison."""
  calls = []

  def checksums(params):
    calls.append(run.transfer.checksums(params))
    return calls[-1]

  transfer = Spy(run.transfer, checksums=checksums)
  return dataclasses.replace(run, transfer=transfer), calls


class TestPeriod:
  """All weights are verified at every start and every few steps."""

  @pytest.mark.parametrize(("every", "first"), [(0, 1), (2, 2), (9, 1)])
  def test_checksums_are_compared_when_due(
    self, make_run, tmp_path, every, first
  ):
    run, calls = counted(make_run("apart"))
    run = with_config(run, sampler__parity_check_every=every)
    loop.train(with_config(run, run__steps=2), tmp_path)
    assert len(calls) == first
    loop.train(with_config(run, run__steps=3), tmp_path)
    assert len(calls) == first + 1  # On resume.


class TestParityCheck:
  @pytest.mark.parametrize("name", ["shared", "apart"])
  def test_passes_and_is_logged_when_due(self, make_run, tmp_path, name):
    run, versions = checked(
      with_config(make_run(name), sampler__parity_check_every=2)
    )
    loop.train(run, tmp_path)
    assert versions == [0, 2, 4]
    errors = {
      row["step"]: row["sampler_trainer/parity_error"]
      for row in tiny_run.comparable(tmp_path)
      if "sampler_trainer/parity_error" in row
    }
    assert list(errors) == versions
    assert all(0 <= error <= 1e-6 for error in errors.values())

  def test_a_resumed_run_is_checked_at_its_start(self, make_run, tmp_path):
    run, versions = checked(with_config(make_run("apart"), run__steps=2))
    loop.train(run, tmp_path)
    loop.train(with_config(run, run__steps=3), tmp_path)
    assert versions == [0, 2]
    with contextlib.closing(
      checkpoint.Checkpointer(tmp_path / "checkpoints", keep=2)
    ) as saver:
      _, weights = loop.restore(run, saver, 3)
      assert weights.version == 3

  def test_is_off_at_zero(self, make_run, tmp_path):
    run, versions = checked(
      with_config(
        make_run("shared"), sampler__parity_check_every=0, run__steps=2
      )
    )
    loop.train(run, tmp_path)
    assert versions == []
    rows = tiny_run.comparable(tmp_path)
    assert not any("sampler_trainer/parity_error" in row for row in rows)

  def test_a_refusal_stops_the_run_before_the_next_sample(
    self, make_run, tmp_path
  ):
    run, rollouts = recorded(make_run("shared"))
    run, _ = checked(with_config(run, sampler__parity_check_every=WRONG), WRONG)
    with pytest.raises(sync.SyncError, match="refused"):
      loop.train(run, tmp_path)
    assert len(rollouts) == 1 + WRONG

  def test_a_sampler_that_means_something_else_writes_nothing(
    self, make_run, tmp_path
  ):
    run, rollouts = recorded(make_run("apart"))
    fns = run.learner.policy.fns

    def shifted(params, memory, pages, tokens, positions, writing):
      return fns.decode(params, memory, pages, tokens, positions // 2, writing)

    check = sync.make_parity_check(
      fns._replace(decode=shifted),
      sync.parity_tokens(fns.config.vocab_size, rows=4, length=9),
      tolerance=1e-5,
      page_size=4,
    )
    with pytest.raises(sync.SyncError, match="version 0 differ"):
      loop.train(dataclasses.replace(run, parity_check=check), tmp_path)
    assert not rollouts and not tiny_run.comparable(tmp_path)
