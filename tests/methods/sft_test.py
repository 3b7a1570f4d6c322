"""Supervised fine-tuning: trained tokens, gradients, and complete runs."""

import copy
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from helpers import chat_model, recipes, registries
from tokenizers import decoders, models, pre_tokenizers

from jaxrl_llm import register
from jaxrl_llm.data import prompt_source
from jaxrl_llm.data.prompt_source import TEMPLATES
from jaxrl_llm.data.rows import Row, to_example
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError
from jaxrl_llm.methods.sft import Demonstrations
from jaxrl_llm.metrics import read_rows
from jaxrl_llm.trainer import build
from jaxrl_llm.types import Origin, Status

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
MORE = {"role": "user", "content": "and 1?"}
LAST = {"role": "assistant", "content": "It is 5."}
TALK = [{"role": "system", "content": "Add."}, ASKED, SAID, MORE, LAST]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  return Tokenizer(chat_model.write(tmp_path_factory.mktemp("chat") / "model"))


@pytest.fixture
def own_parts():
  with registries.registered():
    register.optimizer("sgd", recipes.sgd)
    register.reward("polite", lambda response: "please" in response)
    yield


def make_source(tokenizer, fields, template="chat", columns=None, **settings):
  example = to_example(Row("data.jsonl:1", fields), columns, name="data-1")
  limits = {"max_prompt_length": 99, "max_response_length": 99}
  return Demonstrations(
    [example],
    TEMPLATES[template](tokenizer),
    tokenizer,
    seed=None,
    **limits | {"response_format": "{completion}", "stop": ""} | settings,
  )


def shown(tokenizer, prompt):
  """Returns texts of the prompt, the response, and its trained tokens.

  In them, `|` is the end token.
  """
  trained = np.asarray(prompt.demonstrated)
  opening = np.asarray(prompt.opening)
  decode = lambda tokens: tokenizer.decode(tokens, skip_special=False)
  of = lambda tokens: decode(tokens).replace(decode([tokenizer.eos_id]), "|")
  return of(prompt.tokens), of(opening), of(opening[trained])


class TestTokens:
  def test_every_turn_of_the_assistant(self, tokenizer):
    prompt = make_source(tokenizer, {"messages": TALK}).prompt(0, 0)
    asked, said, trained = shown(tokenizer, prompt)
    assert asked == "system: Add.|\nuser: 2+2?|\nassistant: "
    assert trained == "4|It is 5.|"
    assert said == "4|\nuser: and 1?|\nassistant: It is 5.|"
    # As the template formats the entire conversation.
    whole = tokenizer.apply_chat(TALK, {"add_generation_prompt": False})
    length = len(prompt.tokens) + len(prompt.opening)
    assert [*prompt.tokens, *prompt.opening] == whole[:length]
    assert prompt.tries == 1

  @pytest.mark.parametrize(
    "fields",
    [
      {"prompt": [ASKED], "completion": [SAID]},
      {"prompt": [ASKED], "completion": "4"},
      {"messages": [ASKED, SAID]},
      {"question": "2+2?", "answer": "9", "solution": "4"},
      {"prompt": "2+2?", "completion": "4"},
    ],
  )
  def test_layouts_of_one_answer(self, tokenizer, fields):
    prompt = make_source(tokenizer, fields).prompt(0, 0)
    asked, said, trained = shown(tokenizer, prompt)
    assert asked == "user: 2+2?|\nassistant: "
    assert said == trained == "4|"

  def test_an_answer_in_the_prompt_is_not_trained(self, tokenizer):
    fields = {"prompt": [ASKED, SAID, MORE], "completion": [LAST]}
    prompt = make_source(tokenizer, fields).prompt(0, 0)
    assert shown(tokenizer, prompt)[1:] == ("It is 5.|",) * 2
    assert prompt.messages == [ASKED, SAID, MORE]

  def test_text_after_text(self, tokenizer):
    fields = {"question": "2+2?", "answer": "4", "why": "2+2=4"}
    source = make_source(
      tokenizer,
      fields,
      "completion",
      {"completion": "why"},
      response_format=" {completion} #{answer}",
      stop="\n",
    )
    prompt = source.prompt(0, 0)
    assert shown(tokenizer, prompt) == ("2+2?", *[" 2+2=4 #4\n"] * 2)

  def test_evaluation_asks_the_first_question(self, tokenizer):
    example = to_example(Row("data.jsonl:1", {"messages": TALK}), name="1")
    assert example.messages == TALK[:2] and example.question == "2+2?"
    assert example.completion == TALK[2:]

  @pytest.mark.parametrize(
    ("fields", "why"),
    [
      ({"question": "2+2?", "answer": "4"}, "data-1: its answer is None; give"),
      ({"prompt": [ASKED], "completion": [MORE]}, r"its answer is \[\{'role'"),
      ({"prompt": "2+2?", "completion": ""}, "data-1: its answer is ''; give"),
      ({"messages": [SAID]}, "'messages' begins with the assistant"),
    ],
  )
  def test_no_answer(self, tokenizer, fields, why):
    with pytest.raises(InputError, match=why) as raised:
      make_source(tokenizer, fields).check([0])
    assert "\n" not in str(raised.value)

  def test_long_ones_follow_on_long(self, tokenizer):
    fields = {"prompt": "2+2?", "completion": "12345"}  # Plus the end token.
    source = make_source(tokenizer, fields, max_response_length=6)
    assert source.check([0]) == [True]
    settings = {"max_response_length": 5}
    with pytest.raises(InputError, match="'data-1' has 6 tokens, the limit is"):
      make_source(tokenizer, fields, **settings).check([0])
    source = make_source(tokenizer, fields, on_long="drop", **settings)
    assert source.check([0]) == [False]

  def test_a_text_far_too_long_is_not_tokenised(self, tokenizer, monkeypatch):
    fields = {"prompt": "2+2?", "completion": "1" * 10**6}
    source = make_source(tokenizer, fields)
    prompt = prompt_source.PromptSource.prompt(source, 0, 0)
    monkeypatch.setattr(Tokenizer, "_encode", None)
    monkeypatch.setattr(prompt_source.PromptSource, "prompt", lambda *_: prompt)
    with pytest.raises(
      InputError, match="has [0-9]{6} tokens, the limit is 99"
    ):
      source.check([0])

  def test_a_tool_and_its_reply_are_in_the_template(self, tokenizer):
    mine = copy.copy(tokenizer)
    mine.chat_template = mine.chat_template.replace(
      "{{ m['content'] }}", "{{ m['content'] }}{{ m.tool_calls }}"
    )
    call = {"role": "assistant", "content": None, "tool_calls": "CALL"}
    reply = {"role": "tool", "content": [{"type": "text", "text": "3"}]}
    fields = {"messages": [ASKED, call, reply, SAID]}
    prompt = make_source(mine, fields).prompt(0, 0)
    trained = shown(tokenizer, prompt)[2]
    assert trained == "CALL|4|"
    assert shown(tokenizer, prompt)[1] == "CALL|\ntool: 3|\nassistant: 4|"

  def test_a_template_without_ends_cannot_separate_turns(self, tokenizer):
    source = make_source(tokenizer, {"messages": TALK})
    source._template = lambda example: tokenizer.encode("2+2?")
    with pytest.raises(InputError, match="one answer per row"):
      source.check([0])


THINKING = (  # Writes reasoning as Qwen 3 does.
  "{% for m in messages %}"
  "{% set said = m.content.split('</think>') %}"
  "{{ m.role }}: {% if m.role == 'assistant' %}<think>\n"
  "{{ said[0].split('<think>')[1] | trim if said[1:] }}\n</think>\n\n"
  "{{ said[-1] | trim }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}\n"
  "{% endfor %}{% if add_generation_prompt %}assistant: OPENED{% endif %}"
)


class TestOpenedBlocks:
  """A template may begin the answer, usually with its reasoning."""

  def source(self, tokenizer, template, said):
    mine = copy.copy(tokenizer)
    mine.chat_template = template
    talk = [x | {"content": said} if x is SAID else x for x in TALK[1:]]
    return make_source(mine, {"messages": talk})

  @pytest.mark.parametrize("opened", ["", "<think>\n", "<think>"])
  @pytest.mark.parametrize("thought", ["", "2 and 2"])
  def test_are_written_once(self, tokenizer, opened, thought):
    said = f"<think>\n{thought}\n</think>\n\n4" if thought else "4"
    template = THINKING.replace("OPENED", opened)
    prompt = self.source(tokenizer, template, said).prompt(0, 0)
    asked, rest, trained = shown(tokenizer, prompt)
    assert asked == f"user: 2+2?|\nassistant: {opened}"
    first = f"<think>\n{thought}\n</think>\n\n4|"
    last = "<think>\n\n</think>\n\nIt is 5.|"
    between = f"\nuser: and 1?|\nassistant: {opened}"
    first, last = first.removeprefix(opened), last.removeprefix(opened)
    assert rest == first + between + last and trained == first + last

  def test_that_share_a_token_with_the_answer(self, tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*alphabet, "ĊĊ"])}
    bpe = tokenizers.Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(["<eos>"])
    bpe.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 257}')
    tokenizer = Tokenizer(tmp_path)
    template = THINKING.replace("OPENED", "<think>\n")
    prompt = self.source(tokenizer, template, "4").prompt(0, 0)
    _, rest, _ = shown(tokenizer, prompt)
    assert rest.startswith("\n</think>\n\n4|\nuser")
    # The prompt is that of sampling.
    one, two = tokenizer.encode("\n"), tokenizer.encode("\n\n")
    assert len(two) == 1
    whole = [*prompt.tokens, *prompt.opening]
    begin = [*tokenizer.encode("<think>"), *one, *one, tokenizer.encode("<")[0]]
    place = len(prompt.tokens) - len(begin) + 2
    assert whole[place : place + len(begin)] == begin

  @pytest.mark.parametrize(
    "template, said, why",
    [
      # As DeepSeek-R1-Distill: history is without reasoning.
      (THINKING.replace("OPENED", "<think>\nHm."), "4", "ends its prompt with"),
      (
        "{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')"
        "[-1] }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        "<think>2 and 2</think>4",
        "leaves out a part of the answer '<think>2 and 2</think>4'",
      ),
    ],
  )
  def test_of_another_kind_are_told(self, tokenizer, template, said, why):
    with pytest.raises(InputError, match=f"data-1: the chat template {why}"):
      self.source(tokenizer, template, said).check([0])


class TestUpdate:
  def test_batch(self, model):
    run = build.make_run(recipes.make_config("sft", model))
    _, responses = recipes.collect(run)
    rollout = responses.rollout
    decode = Tokenizer(model).decode
    for row, number in enumerate(rollout.example_id.tolist()):
      problem = run.source._source.problem(number)
      said = rollout.tokens[row, : rollout.lengths[row]]
      assert decode(said) == problem.solution and said[-1] == 1
    present = np.arange(24) < rollout.lengths[:, None]
    np.testing.assert_array_equal(rollout.mask, present)
    assert (rollout.origin[present] == Origin.FOREIGN).all()
    assert (rollout.status == Status.FINISHED).all()
    assert responses.judged.all() and not responses.rewards.any()
    assert len(set(rollout.group_id.tolist())) == 8

  @pytest.mark.usefixtures("own_parts")
  def test_is_the_gradient_of_the_mean_likelihood(self, model, tmp_path):
    # Some tokens of the response belong to questions.
    rows = [TALK[1:], [ASKED, SAID], [MORE, LAST], [ASKED, SAID, ASKED, LAST]]
    chat = chat_model.write(tmp_path / "chat")
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps({"messages": x}) for x in rows * 2))
    run = build.make_run(
      recipes.make_config(
        "sft",
        chat,
        data__settings={},
        data__source="jsonl",
        data__path=str(file),
        data__template="chat",
        data__max_prompt_length=30,
        data__holdout=0.0,
        reward__name="polite",
        sampler__max_response_length=45,
        optimizer__max_tokens_per_row=150,
        **recipes.SGD,
      )
    )
    states, responses = recipes.collect(run)
    mask = responses.rollout.mask
    lengths = responses.rollout.lengths
    assert 0 < mask.sum() < lengths.sum()
    mean = lambda logprobs: -jnp.sum(jnp.where(mask, logprobs, 0)) / mask.sum()
    row = recipes.check_first_update(run, states, responses, mean)
    assert row["policy/ratio_max"] == 1


class TestRun:
  def test_three_steps_and_a_resume(self, model, tmp_path):
    config = recipes.make_config("sft", model)
    rows, _ = recipes.train(config, tmp_path / "run")
    for row in rows[1:]:
      assert row["rollout/tokens"] == 0 and "reward/mean" not in row
      assert row["policy/skipped"] == 0 and row["policy/loss"] > 0
      assert "sampler_trainer/logprob_diff_max" not in row
    assert rows[3]["policy/loss"] < rows[1]["policy/loss"]
    assert "eval/chain_sum/avg@2" in rows[0] and rows[3].keys() >= {
      "eval/chain_sum/avg@2"
    }

  def test_demonstrations_among_sampled_responses(self, model, tmp_path):
    """A user-defined prompt source may provide responses for some prompts."""

    class Half(Demonstrations):
      def prompt(self, example_id, group_id):
        base = super() if group_id % 2 else super(Demonstrations, self)
        return base.prompt(example_id, group_id)

    with registries.registered():

      def half(algorithm, s):
        return dataclasses.replace(algorithm, prompts=Half, checks=())

      register.method("half", half)
      logged = {"run__samples": 0, "run__samples_every": 1}
      both = {"method__use": ("sft", "half")}
      config = recipes.make_config("sft", model, **both, **logged)
      rows, _ = recipes.train(config, tmp_path / "run")
    for sample in read_rows(tmp_path / "run" / "samples.jsonl"):
      if sample["step"]:  # Data have no rewards.
        (author, _), *_ = sample["origin"]
        assert (sample["reward"] is None) == (author == "given")
        assert (sample["correct"] is None) == (author == "given")
    for row in rows[1:]:
      assert row["rollout/tokens"] > 0 and row["reward/errors"] == 0
      assert row["sampler_trainer/logprob_diff_max"] < 1e-5

  @pytest.mark.parametrize(
    ("changes", "why"),
    [
      ({"schedule__lag": 1}, "schedule.lag=1: demonstrations are not sampled"),
      ({"schedule__window": 5}, "schedule.window=5: demonstrations are not sa"),
      (
        {"schedule__streaming": True},
        "streaming=True: demonstrations are not",
      ),
      ({"data__group_size": 2}, "data.group_size=2: demonstrations are not sa"),
      (
        {"sampler__temperature": 0.5},
        "temperature=0.5: demonstrations are not",
      ),
      (
        {"off_policy__correction": "mask"},
        "correction='mask': demonstrations are not",
      ),
      ({"method__sft__stop": "12"}, "stop has '12', which is"),
      (
        {"sampler__max_response_length": 6},
        "tokens, the limit is 6; raise",
      ),
    ],
  )
  def test_refusals(self, model, changes, why):
    config = recipes.make_config("sft", model, **changes)
    with pytest.raises(InputError, match=why) as raised:
      recipes.collect(build.make_run(config))
    assert "\n" not in str(raised.value)
