"""Starts local processes with separate CPU devices that connect."""

import socket
import subprocess
import sys

from helpers import programs


def start(program, *arguments, count, devices, folder, patience_s=20, last=()):
  """Starts `count` processes, or one without peers; returns their Popens.

  The last one also has the arguments `last`. Each writes its output to
  `folder`/INDEX.log.
  """
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  folder.mkdir(parents=True, exist_ok=True)
  force = f"--xla_force_host_platform_device_count={devices}"
  environment = programs.environment(XLA_FLAGS=f"{force} {programs.FLAGS}")
  started = []
  for index in range(count):
    meet = [f"--coordinator={address}", f"--num_processes={count}"]
    meet += [f"--process_id={index}", f"--patience_s={patience_s}"]
    meet += last if index == count - 1 else ()
    with (folder / f"{index}.log").open("w") as log:
      started.append(
        subprocess.Popen(
          [sys.executable, program, *arguments, *(meet if count > 1 else ())],
          env=environment,
          stdout=log,
          stderr=subprocess.STDOUT,
        )
      )
  return started


def wait(started, seconds=600):
  """Returns exit codes; processes that do not end in time are killed."""
  try:
    return [process.wait(seconds) for process in started]
  finally:
    for process in started:
      process.kill()
