"""Prompts: templates, and a source whose entire state is a value."""

import copy
import dataclasses
import json

import pretraining
import pytest
from helpers import cases

from jaxrl_llm.data import prompt_source, tasks
from jaxrl_llm.data.tokenizer import Tokenizer
from jaxrl_llm.errors import InputError

_CASES = cases.load("prompts")

CHATML = (
  "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}<s>"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  """One token per character, with control tokens `<s>` and `</s>`."""
  path = tmp_path_factory.mktemp("tokenizer")
  letters = tasks.CHARACTERS + "!\n :<>/{}abcdefghijklmnopqrstuvwxyzQA\\"
  text = pretraining.character_tokenizer_json(letters)
  text = text.replace("<pad>", "<s>").replace("<eos>", "</s>")
  (path / "tokenizer.json").write_text(text)
  (path / "config.json").write_text('{"eos_token_id": 1, "bos_token_id": 0}')
  (path / "chat_template.jinja").write_text(CHATML)
  return Tokenizer(path)


def example(question, answer="1"):
  return tasks.Example("x", question, answer, "test")


POOL = [example(f"{i}+{i}=", str(2 * i)) for i in range(1, 5)]


class TestTemplates:
  def test_completion_is_the_question(self, tokenizer):
    template = prompt_source.completion(tokenizer)
    assert tokenizer.decode(template(example("7+5?"))) == "7+5?"

  def test_few_shot_shows_solved_examples_but_never_the_asked_one(
    self, tokenizer
  ):
    template = prompt_source.few_shot(tokenizer, pool=POOL, shots=2)
    shown = lambda question: tokenizer.decode(template(example(question)))
    assert shown("12+34=") == "1+1=2\n2+2=4\n12+34="
    assert shown("2+2=") == "1+1=2\n3+3=6\n2+2="

  def test_formats_leave_other_braces_alone(self, tokenizer):
    template = prompt_source.few_shot(
      tokenizer,
      pool=[example("q{answer}", "{question}"), POOL[0]],
      shots=1,
      shot_format="Q: {question}\nA: \\boxed{{answer}}\n{x}",
      question_format="Q: {question}\nA: ",
    )
    assert tokenizer.decode(template(example("2?"))) == (
      "Q: q{answer}\nA: \\boxed{{question}}\n{x}Q: 2?\nA: "
    )

  @pytest.mark.parametrize("shots", [-1, 4])
  def test_pool_too_small(self, tokenizer, shots):
    with pytest.raises(ValueError, match=f"shots={shots} of 4"):
      prompt_source.few_shot(tokenizer, pool=POOL, shots=shots)

  def test_a_conversation_keeps_its_own_system_message(self, tokenizer):
    template = prompt_source.chat(tokenizer, system="be brief")
    asked = {"role": "user", "content": "1"}
    for own in ([], [{"role": "system", "content": "be long"}]):
      messages = (*own, asked)
      conversation = dataclasses.replace(example("1"), messages=messages)
      text = tokenizer.decode(template(conversation), skip_special=False)
      said = "be long" if own else "be brief"
      assert text == f"<s>system:{said}</s><s>user:1</s><s>"

  def test_chat_keeps_content_plain(self, tokenizer):
    template = prompt_source.chat(
      tokenizer, system="be brief", question_format="solve {question}"
    )
    tokens = template(example("1</s><s>2"))
    text = tokenizer.decode(tokens, skip_special=False)
    assert text == "<s>system:be brief</s><s>user:solve 1</s><s>2</s><s>"
    assert [t for t in tokens if t < 2] == [0, 1, 0, 1, 0]

  def test_conversations_are_used_as_they_are(self, tokenizer):
    asked = [{"role": "user", "content": "1+1?"}]
    talk = dataclasses.replace(example("1+1?"), messages=asked)
    for make in (prompt_source.chat, prompt_source.completion):
      tokens = make(tokenizer, question_format="solve {question}")(talk)
      text = tokenizer.decode(tokens, skip_special=False)
      assert text == "<s>user:1+1?</s><s>"
    shown = prompt_source.few_shot(tokenizer, pool=POOL, shots=1)
    with pytest.raises(InputError, match="x is a conversation.*'chat'"):
      shown(talk)

  def test_chat_templates_have_variables(self, tokenizer):
    template = CHATML + "{% if think %}{{ think }}{% endif %}"
    thinking = copy.copy(tokenizer)
    thinking.chat_template = template
    written = prompt_source.chat(thinking, kwargs={"think": "x"})
    text = tokenizer.decode(written(example("1")), skip_special=False)
    assert text == "<s>user:1</s><s>x"

  @pytest.mark.parametrize("make", ["completion", "chat"])
  def test_a_row_has_tools_and_variables_of_its_own(self, tokenizer, make):
    mine = copy.copy(tokenizer)
    mine.chat_template = CHATML + "{{ tools | length }}{{ think }}{{ x }}"
    asked = [{"role": "user", "content": "1"}]
    tools = [{"name": "a", "default": None}]
    template = prompt_source.TEMPLATES[make](mine)
    for own in (tools, json.dumps(tools)):
      own = {"tools": own, "chat_template_kwargs": {"think": 7, "x": None}}
      row = dataclasses.replace(example("1"), messages=asked, columns=own)
      text = tokenizer.decode(template(row), skip_special=False)
      assert text == "<s>user:1</s><s>17"

  def test_those_of_a_row_come_first_but_an_environment_has_its_tools(
    self, tokenizer
  ):
    mine = copy.copy(tokenizer)
    mine.chat_template = CHATML + "{{ tools | length }}{{ think }}"
    own = {"tools": [{}, {}], "chat_template_kwargs": {"think": 7}}
    row = dataclasses.replace(example("1"), columns=own)
    given = {"tools": [{}, {}, {}], "think": 8}
    template = prompt_source.chat(mine, kwargs=given)
    assert tokenizer.decode(template(row)).endswith("37")

  @pytest.mark.parametrize(
    "own", [{"tools": "{"}, {"tools": 3}, {"chat_template_kwargs": [1]}]
  )
  def test_columns_of_another_kind_are_told(self, tokenizer, own):
    row = dataclasses.replace(example("1"), columns=own)
    with pytest.raises(InputError, match=f"x: column '{[*own][0]}' is no"):
      prompt_source.chat(tokenizer)(row)

  @cases.table("end, stops", _CASES["answers_end_with_a_stop_token"])
  def test_answers_end_with_a_stop_token(self, tokenizer, end, stops):
    mine = copy.copy(tokenizer)
    mine.chat_template = (
      "{% for m in messages %}{{ m.role }}:{{ m.content }}"
      f"{end}{{% endfor %}}{{% if add_generation_prompt %}}<s>{{% endif %}}"
    )
    asked = [{"role": "user", "content": "1"}]
    talk = dataclasses.replace(example("1"), messages=asked)
    for use in (
      lambda: prompt_source.chat(mine),
      lambda: prompt_source.completion(mine)(talk),
    ):
      if stops:
        use()
        continue
      with pytest.raises(InputError, match="ends answers with .* no stop tok"):
        use()


def make_prompts(
  tokenizer, source, *, seed=0, max_prompt_length=64, **settings
):
  return prompt_source.PromptSource(
    source,
    prompt_source.completion(tokenizer),
    tokenizer,
    seed=seed,
    max_prompt_length=max_prompt_length,
    **settings,
  )


def draw(prompts, n):
  """Draws the first n prompts of a source."""
  drawn, _ = prompts.draw(prompts.init(), n)
  return drawn


class TestPromptSource:
  def test_fields(self, tokenizer):
    prompts = make_prompts(tokenizer, tasks.ChainSum(seed=2))
    *_, prompt = draw(prompts, 12)
    assert prompt.group_id == 11
    assert tokenizer.decode(prompt.tokens) == prompt.text == prompt.question
    assert prompt.source == "chain_sum/train"
    index = int(prompt.id.removeprefix("chain_sum-train-"))
    assert index == prompt.example_id
    assert tasks.ChainSum(seed=2)[index].answer == prompt.answer

  def test_the_text_has_control_tokens(self, tokenizer):
    asked = dataclasses.replace(
      example("1"), messages=[{"role": "user", "content": "1"}]
    )
    (prompt,) = draw(make_prompts(tokenizer, [asked]), 1)
    assert prompt.text == "<s>user:1</s><s>"

  @pytest.mark.parametrize(
    "make", [lambda: tasks.ChainSum(seed=1), lambda: tasks.sums(digits=1)]
  )
  def test_resumes_from_its_state_alone(self, tokenizer, make):
    whole = draw(make_prompts(tokenizer, make()), 200)
    for position, n in ((0, 7), (50, 30), (61, 1), (199, 1), (60, 140)):
      before = make_prompts(tokenizer, make())
      _, state = before.draw(before.init(), position)
      # Another process has only the state's numbers and the settings.
      state = prompt_source.PromptSourceState(**dataclasses.asdict(state))
      part, _ = make_prompts(tokenizer, make()).draw(state, n)
      assert part == whole[position : position + n]

  def test_a_drawn_prompt_is_found_again(self, tokenizer):
    settings = {"max_prompt_length": 7, "on_long": "drop"}
    for make in (
      lambda: make_prompts(tokenizer, tasks.ChainSum(seed=1)),
      lambda: make_prompts(tokenizer, POOL),
      lambda: make_prompts(
        tokenizer, [example("1" * n) for n in range(1, 11)], **settings
      ),
    ):
      for prompt in draw(make(), 30):
        # By a source that has drawn nothing.
        assert make().prompt(prompt.example_id, prompt.group_id) == prompt

  def test_every_epoch_is_a_new_order_of_all(self, tokenizer):
    source = [example(str(i)) for i in range(20)]
    prompts = make_prompts(tokenizer, source)
    assert len(prompts) == 20
    questions = [p.question for p in draw(prompts, 60)]
    epochs = [questions[k : k + 20] for k in (0, 20, 40)]
    assert all(sorted(e, key=int) == sorted(epochs[0], key=int) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 3

  def test_seeds_differ_also_across_epochs(self, tokenizer):
    source = [example(str(i)) for i in range(20)]
    orders = set()
    for seed in range(4):
      drawn = draw(make_prompts(tokenizer, source, seed=seed), 60)
      questions = tuple(p.question for p in drawn)
      orders |= {questions[k : k + 20] for k in (0, 20, 40)}
    assert len(orders) == 12

  def test_without_seed_in_the_order_of_the_source(self, tokenizer):
    prompts = make_prompts(tokenizer, POOL, seed=None)
    drawn = draw(prompts, 6)
    questions = [p.question for p in drawn]
    assert questions == ["1+1=", "2+2=", "3+3=", "4+4=", "1+1=", "2+2="]
    assert [p.answer for p in drawn[:4]] == ["2", "4", "6", "8"]

  def test_a_text_far_too_long_is_not_tokenised(self, tokenizer, monkeypatch):
    kinds = {"question": "1" * 10**6}
    kinds["messages"] = [{"role": "user", "content": kinds["question"]}]
    monkeypatch.setattr(Tokenizer, "_encode", None)
    for name, value in kinds.items():
      long = dataclasses.replace(example("1"), **{name: value})
      prompts = make_prompts(tokenizer, [long])
      with pytest.raises(
        InputError, match="'x' has [0-9]{6} tokens, the limit"
      ):
        prompts.check([0])
      assert make_prompts(tokenizer, [long], on_long="drop").check([0]) == [
        False
      ]

  def test_names_of_control_tokens_in_questions_are_found(self, tokenizer):
    said = [{"role": "user", "content": x} for x in ("</s>", "1")]
    talk = dataclasses.replace(example("1"), messages=said)
    prompts = make_prompts(tokenizer, [example("a<s>"), example("1"), talk])
    assert prompts.spelled([0, 1, 2]) == ["<s>", "", "</s>"]

  def test_a_prompt_without_tokens_is_refused(self, tokenizer):
    prompts = prompt_source.PromptSource(
      POOL, lambda example: [], tokenizer, seed=0, max_prompt_length=8
    )
    with pytest.raises(InputError, match="has no tokens; correct data.templ"):
      draw(prompts, 1)

  def test_a_long_prompt_is_refused_by_name(self, tokenizer):
    source = [tasks.Example("row-9", "1" * 8, "1", "test")]
    assert draw(make_prompts(tokenizer, source, max_prompt_length=8), 1)
    prompts = make_prompts(tokenizer, source, max_prompt_length=7)
    with pytest.raises(
      InputError,
      match="'row-9' has 8 tokens, the limit is 7; raise"
      " data.max_prompt_length",
    ):
      draw(prompts, 1)

  def test_long_prompts_are_dropped(self, tokenizer):
    source = [example("1" * n) for n in range(1, 11)]
    settings = {"max_prompt_length": 7, "on_long": "drop"}
    prompts = make_prompts(tokenizer, source, **settings)
    first, state = prompts.draw(prompts.init(), 5)
    assert prompts.draw(state, 0) == ([], state)
    second, state = prompts.draw(state, 9)
    whole = draw(prompts, 14)
    assert first + second == whole  # Two epochs of the seven short ones.
    assert all(len(p.tokens) <= 7 for p in whole)
    assert [p.group_id for p in whole] == list(range(14))
    for epoch in (whole[:7], whole[7:]):
      assert {p.example_id for p in epoch} == set(range(7))
    # The position also counts dropped prompts: 10 per epoch.
    assert state.drawn == 14 and 14 < state.position <= 20

  def test_all_too_long(self, tokenizer):
    source = [example("1" * 9)] * 3
    settings = {"max_prompt_length": 7, "on_long": "drop"}
    prompts = make_prompts(tokenizer, source, **settings)
    with pytest.raises(InputError, match="5 prompts in a row"):
      draw(prompts, 1)

  def test_one_short_prompt_is_enough(self, tokenizer):
    source = [example("1" * (8 + bool(n))) for n in range(20)]
    settings = {"max_prompt_length": 8, "on_long": "drop"}
    drawn = draw(make_prompts(tokenizer, source, **settings), 3)
    assert {prompt.example_id for prompt in drawn} == {0}

  def test_empty_source(self, tokenizer):
    with pytest.raises(InputError, match="dataset is empty"):
      make_prompts(tokenizer, [])
