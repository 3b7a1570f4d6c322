"""Supervised fine-tuning: the responses come from the data.

    L = -log π(y_t), a mean over the answers' tokens of a mini-batch

Differs from the other methods in that nothing is sampled in training: a prompt
comes with its complete response, in which answers are trained on and further
questions are only read. No reward is needed; evaluation generates and judges as
usual. With `weighted` the loss is -A log π(y_t), with the advantages of the
algorithm.
"""

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array

from jaxrl_llm import config, losses
from jaxrl_llm.data import rows
from jaxrl_llm.data.prompt_source import PromptSource
from jaxrl_llm.data.tasks import Example, Prompt
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Algorithm, Settings, part


class Demonstrations(PromptSource):
  """Draws prompts with the answers of the data as their responses.

  An answer is a text or messages. All messages of the assistant are trained on,
  including the token that ends each. Questions between them are only read, as
  the template formats them.
  """

  def __init__(
    self,
    *args: Any,
    max_response_length: int,
    response_format: str,
    stop: str,
    **settings: Any,
  ):
    """Builds the order.

    Args:
      *args: arguments of `PromptSource`.
      max_response_length: maximum length of an answer in tokens, as
        `max_prompt_length` is for a prompt.
      response_format: format of text answers.
      stop: text of a single token that ends text answers; '' is the end token.
      **settings: arguments of `PromptSource`.
    """
    super().__init__(*args, **settings)
    self._max_response, self._format = max_response_length, response_format
    self._stop = None
    if stop:
      what = "config.method.sft.stop"
      (self._stop,) = self._tokenizer.single_tokens([stop], what)

  def check(self, example_ids: Sequence[int]) -> list[bool]:
    """Tokenizes rows with their answers, see `PromptSource.check`."""
    return [self.prompt(i, 0) is not None for i in example_ids]

  def prompt(self, example_id: int, group_id: int) -> Prompt | None:
    """Returns the prompt of a row with its response; None if it is dropped.

    Raises:
      InputError: The row has no answer, or it is too long.
    """
    prompt = super().prompt(example_id, group_id)
    if prompt is None:
      return None
    said = self._said(prompt)
    tokens = range(self._tokenizer.fewest(x["content"] for x in said))
    if len(tokens) <= self._max_response:
      tokens, trained = self._answer(prompt, said)
    if len(tokens) <= self._max_response:
      given = {"opening": tuple(tokens), "demonstrated": tuple(trained)}
      return dataclasses.replace(prompt, tries=1, **given)
    if self._drop:
      return None
    raise InputError(
      f"the answer to {prompt.id!r} has {len(tokens)} tokens, the limit is"
      f" {self._max_response}; raise sampler.max_response_length or set"
      " data.on_long='drop'"
    )

  def _said(self, example: Example) -> Sequence[dict]:
    """Returns the messages after the question; a text is one of them."""
    said, text = example.completion, self._format
    if rows.is_conversation(said) and said[0]["role"] == "assistant":
      return said
    if "{completion}" in text and not (isinstance(said, str) and said):
      raise InputError(
        f"{example.id}: its answer is {repr(said)[:40]}; give a text, or"
        " messages that begin with the assistant's, and name their column by"
        " data.columns={'completion': NAME}"
      )
    text = text.replace("{answer}", example.answer)
    text = text.replace("{completion}", said or "")
    return [{"role": "assistant", "content": text}]

  def _answer(
    self, prompt: Prompt, said: Sequence[dict]
  ) -> tuple[list[int], list[bool]]:
    """Returns the tokens of an answer, and which of them are trained on."""
    tokens, trained, begin = [], [], len(prompt.tokens)
    for turn, message in enumerate(said):
      if message["role"] != "assistant":
        continue
      context = self._rendered(prompt, said[:turn])
      # The template's text between two answers is not trained on.
      stops, seen = [-1, *self._stops(context)], len(self._stops(tokens))
      if len(stops) <= seen:
        raise InputError(
          f"{prompt.id}: the chat template must end every answer with a stop"
          " token, or turns cannot be separated; give one answer per row"
        )
      between = context[stops[seen] + 1 :]
      written = self._written(prompt, said[: turn + 1], context)
      tokens += between + written
      trained += [False] * len(between) + [True] * len(written)
    return tokens[begin:], trained[begin:]

  def _rendered(self, prompt: Prompt, said: Sequence[dict]) -> list[int]:
    """Returns the tokens of the prompt and the messages after it."""
    if not said:
      return list(prompt.tokens)
    return list(self._template(dataclasses.replace(prompt, said=said)))

  def _written(
    self, prompt: Prompt, said: Sequence[dict], context: list[int]
  ) -> list[int]:
    """Returns the last message as the template writes it, up to its end.

    Args:
      prompt: the prompt.
      said: the messages after it, up to this one.
      context: tokens before this message.
    """
    tokenizer, content = self._tokenizer, said[-1]["content"]
    whole, alone = self._rendered(prompt, said), tokenizer.continued(content)
    # Templates may shorten an answer, usually by its reasoning.
    plain = lambda tokens: "".join(tokenizer.decode(tokens).split())
    if whole == context:  # The template has no place for answers.
      whole = [*context, *alone]
    elif plain(alone) not in plain(whole):
      raise InputError(
        f"{prompt.id}: the chat template leaves out a part of the answer"
        f" {content[:40]!r}; use a template that writes all of it"
      )
    # Chat templates end all messages with one token; plain text has none.
    usual = [tokenizer.eos_id, *(context[i] for i in self._stops(context))]
    written = [*self._rest(prompt, context, whole), usual[-1]]
    end = self._stops(written)[0]
    return [*written[:end], written[end] if self._stop is None else self._stop]

  def _rest(
    self, prompt: Prompt, context: list[int], whole: list[int]
  ) -> list[int]:
    """Returns the tokens of a conversation after those of its beginning.

    Text at the end of the beginning, such as `<think>` and a newline, may share
    a token with what follows. Only this token is encoded again.
    """
    if whole[: len(context)] == context:
      return whole[len(context) :]
    decode = functools.partial(self._tokenizer.decode, skip_special=False)
    # An unfinished character is no text yet.
    length = lambda end: len(decode(whole[:end]).rstrip("\ufffd"))
    opened = decode(context)
    end = bisect.bisect_left(range(len(whole)), len(opened), key=length)
    text = decode(whole[:end])
    if text.startswith(opened):
      return [*self._tokenizer.continued(text[len(opened) :]), *whole[end:]]
    raise InputError(
      f"{prompt.id}: the chat template ends its prompt with {opened[-20:]!r},"
      " but writes this answer without; choose answers, data.template_settings"
      " or a template that agree"
    )

  def _stops(self, tokens: Sequence[int]) -> list[int]:
    """Returns the positions of stop tokens."""
    stop = self._tokenizer.stop_tokens
    return [i for i, token in enumerate(tokens) if token in stop]


def given(mask: Array) -> Array:
  """Advantages of 1 at every token of a demonstration, [B, T]."""
  return mask.astype(jnp.float32)


def likelihood(logprobs: Array, advantages: Array) -> losses.ClippedPolicyLoss:
  """Loss -A log π without a ratio, as no policy sampled the tokens."""
  return losses.policy_gradient_loss(logprobs, logprobs, advantages)


_SAMPLED = (
  *("schedule.stop", "schedule.window", "schedule.streaming"),
  *("data.group_size", "schedule.lag", "schedule.replay"),
  *("schedule.dynamic_sampling", "environment.name", "reward.group"),
  *("sampler.temperature", "loss.kl_coefficient"),
  *("loss.kl_reward_coefficient", "loss.nll_coefficient"),
  *("off_policy.proximal", "off_policy.correction"),
)


def sft(
  algorithm: Algorithm,
  s: Settings,
  *,
  response_format: str = "{completion}",
  stop: str = "",
  weighted: bool = False,
) -> Algorithm:
  """Trains on the answers of the data.

  Args:
    algorithm: any algorithm.
    s: settings of the run.
    response_format: Format of text answers, with the fields of an example.
    stop: Text of a single token that ends text answers; '' is the end token.
    weighted: Weights tokens by the algorithm's advantages instead of 1.
  """
  advice = "demonstrations are not sampled; use {key}={value!r}"
  config.exclude(s, _SAMPLED, advice)
  weighted = weighted and algorithm.critic is None

  def check(final: Algorithm) -> None:
    if final.prompts is not Demonstrations:
      raise InputError(
        "'sft' trains on demonstrations; leave out methods that draw prompts"
      )

  return algorithm.change(
    advantages=algorithm.advantages if weighted else part(given),
    critic=None,
    policy_loss=part(likelihood),
    corrections={},
    proximal="",
    prompts=Demonstrations,
    prompt_settings={"response_format": response_format, "stop": stop},
    checks=(check,),
  )
