"""A model's files, and prompts and chats to tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.text import kinds
from tokenizers import Tokenizer

from anyengine.errors import EngineError, ModelError, RequestRefusedError
from anyengine.text import ModelText
from anyengine.text.chat_template import ChatTemplate
from anyengine.text.model_files import model_directory

MESSAGES = [{"role": "user", "content": "Hi <there>"}]
TEMPLATE = "<{{ messages[0].content }}>{{ bos_token }}"


def directory_with(
    tmp_path: Path, config: dict[str, object] | None = None, tokenizer: Tokenizer | None = None, **templates: str
) -> Path:
    (tmp_path / "config.json").write_text("{}")
    (tokenizer or kinds.byte_level()).save(str(tmp_path / "tokenizer.json"))
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, template in templates.items():
        path = tmp_path / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(template)
    return tmp_path


def chat(text: ModelText, messages: Any = MESSAGES, **options: Any) -> str:
    return text.decode(text.encode_chat(messages, **options))


# ---- the files ----


@pytest.mark.parametrize(
    ("config", "templates", "expected"),
    [
        (None, {"default": TEMPLATE}, "<Hi <there>>"),
        ({"chat_template": TEMPLATE, "bos_token": "B"}, {}, "<Hi <there>>B"),
        ({"chat_template": "old", "bos_token": "B"}, {"default": TEMPLATE}, "<Hi <there>>B"),
        (
            {
                "chat_template": [
                    {"name": "tool_use", "template": "wrong"},
                    {"name": "default", "template": TEMPLATE},
                ],
                "bos_token": {"content": "B", "special": True},
            },
            {},
            "<Hi <there>>B",
        ),
    ],
)
def test_where_a_chat_template_is_found(
    tmp_path: Path, config: dict[str, object] | None, templates: dict[str, str], expected: str
) -> None:
    assert chat(ModelText.load_sync(directory_with(tmp_path, config, **templates))) == expected


def test_tools_have_a_template_of_their_own(tmp_path: Path) -> None:
    tool_use = "{{ tools | tojson }}"
    text = ModelText.load_sync(directory_with(tmp_path, default="{{ tools is none }}", tool_use=tool_use))
    assert chat(text) == "True"
    assert chat(text, tools=[{"name": "ü"}]) == '[{"name": "ü"}]'
    alone = ModelText(kinds.gemma(), chat_templates={"default": "{{ tools | length }}"})
    assert chat(alone, tools=[{"name": "f"}]) == "1"


@pytest.mark.anyio
async def test_loading_off_the_loop(tmp_path: Path) -> None:
    text = await ModelText.load(directory_with(tmp_path))
    assert text.decode(text.encode("hello wörld")) == "hello wörld"
    with pytest.raises(ModelError, match="there is no such directory"):
        await ModelText.load(tmp_path / "absent")


@pytest.mark.anyio
async def test_templates_are_compiled_when_they_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    class Compiled(ChatTemplate):
        def __init__(self, source: str, variables: Mapping[str, str]) -> None:
            threads.append(threading.get_ident())
            super().__init__(source, variables)

    monkeypatch.setattr("anyengine.text.chat_template.ChatTemplate", Compiled)
    text = await ModelText.load(directory_with(tmp_path, default=TEMPLATE, tool_use="{{ tools | tojson }}"))
    assert chat(text) == "<Hi <there>>"
    assert chat(text, tools=[{"name": "f"}]) == '[{"name": "f"}]'
    assert len(threads) == 2
    assert threading.get_ident() not in threads


def test_a_malformed_template_is_in_the_way_of_chats_alone(tmp_path: Path) -> None:
    text = ModelText.load_sync(directory_with(tmp_path, default="{% if %}"))
    assert text.decode(text.encode("hello")) == "hello"
    with pytest.raises(ModelError, match="chat template is malformed"):
        text.encode_chat(MESSAGES)


def test_short_prompts_start_no_threads(model_directory: Path) -> None:
    program = f"""if True:
        import os
        from anyengine.text import ModelText
        text = ModelText.load_sync({str(model_directory)!r})
        before = len(os.listdir("/proc/self/task"))
        text.encode("hello, " * 500)
        text.encode_chat([{{"role": "user", "content": "Hello?"}}])
        assert len(os.listdir("/proc/self/task")) == before
        text.encode("hello, " * 5000)
        assert len(os.listdir("/proc/self/task")) > before
    """
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"TOKENIZERS_PARALLELISM": "true"})


def test_directories_that_are_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "broken" / name).write_text("{")
    for name, message in (
        ("absent", "there is no such directory"),
        ("Qwen/Qwen3-8B", r"on the Hugging Face hub pass huggingface_hub.snapshot_download\(name\)"),
        ("file", "it is not a directory"),
        ("half", "it has no tokenizer.json"),
        ("broken", "tokenizer.json cannot be read"),
        ("x" * 5000, "there is no such directory"),
    ):
        with pytest.raises(ModelError, match=message) as raised:
            ModelText.load_sync(tmp_path / name)
        assert isinstance(raised.value, EngineError)
    monkeypatch.setenv("ANYENGINE_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="an engine converts it when it first loads it"):
        ModelText.load_sync("default")
    assert model_directory("default").parent == tmp_path


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.jinja"])
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    directory_with(tmp_path)
    (tmp_path / name).write_bytes(b"{\xff")
    with pytest.raises(ModelError, match=f"{name} cannot be read"):
        ModelText.load_sync(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        ModelText.load_sync(tmp_path)


def test_what_a_tokenizer_learnt_in_training_cuts_no_prompt(tmp_path: Path) -> None:
    tokenizer = kinds.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    text = ModelText.load_sync(directory_with(tmp_path, tokenizer=tokenizer))
    assert len(text.encode("abcdefgh")) == 8
    assert len(text.encode("ab")) == 2


# ---- prompts ----


@pytest.mark.engines
def test_a_prompt_has_the_tokens_that_transformers_gives_it(smol: ModelText, model_directory: Path) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(model_directory)
    text = "The sea — 海 🌊\n\n    is, <|im_end|> well, wide."
    assert smol.encode(text) == reference(text).input_ids
    messages = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "A sea."},
        {"role": "user", "content": "Tell me more."},
    ]
    for generation in (True, False):
        for conversation in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
            expected = reference.apply_chat_template(
                conversation, add_generation_prompt=generation, tokenize=True, return_dict=False
            )
            assert smol.encode_chat(conversation, add_generation_prompt=generation) == expected


def test_special_tokens_are_added_to_a_prompt_but_not_to_a_chat() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = kinds.byte_level()
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    text = ModelText(tokenizer, chat_templates={"default": "{{ messages[0].content }}"})
    assert text.encode("")[0] == text.encode("a")[0] == begin
    assert begin not in text.encode("a", add_special_tokens=False)
    assert begin not in text.encode_chat(MESSAGES)


def test_text_that_cannot_be_encoded() -> None:
    text = ModelText(kinds.byte_level(), chat_templates={"default": TEMPLATE})
    with pytest.raises(RequestRefusedError, match=r"half of a surrogate pair \('\\ud83c'\) at 2"):
        text.encode("ab\ud83c")
    with pytest.raises(RequestRefusedError, match="half of a surrogate pair"):
        text.encode_chat([{"role": "user", "content": "\ud83c"}])
    with pytest.raises(TypeError, match=r"text=5 \(int\): expected a string"):
        text.encode(5)  # pyright: ignore[reportArgumentType]


# ---- chats ----


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ("Hi", TypeError, r"messages='Hi' \(str\): expected a list of messages"),
        (5, TypeError, "expected a list of messages"),
        ([], RequestRefusedError, "expected at least one message"),
        (["Hi"], TypeError, r"messages\[0\]='Hi' \(str\): expected a mapping with role and content"),
        ([*MESSAGES, {"content": "Hi"}], RequestRefusedError, r"messages\[1\] has the role None: expected a string"),
        (
            [{"role": "usr", "content": ""}],
            RequestRefusedError,
            r"messages\[0\] has the role 'usr': expected one of sys",
        ),
    ],
)
def test_messages_that_are_none(messages: Any, error: type[Exception], message: str) -> None:
    text = ModelText(kinds.byte_level(), chat_templates={"default": TEMPLATE})
    with pytest.raises(error, match=message):
        text.encode_chat(messages)


def test_a_role_of_the_models_own_is_named_in_its_template() -> None:
    template = "{% if messages[0].role == 'narrator' %}{{ messages[0].content }}{% endif %}"
    text = ModelText(kinds.byte_level(), chat_templates={"default": template})
    assert chat(text, [{"role": "narrator", "content": "Once"}]) == "Once"


def test_without_a_chat_template() -> None:
    with pytest.raises(ModelError, match=r"has no chat template .* takes text and no messages"):
        ModelText(kinds.byte_level()).encode_chat(MESSAGES)


def test_without_jinja_only_chats_are_refused(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, default=TEMPLATE)
    code = f"""
import sys
sys.modules["jinja2"] = None
from anyengine import ModelError
from anyengine.text import ModelText
text = ModelText.load_sync({str(directory)!r})
assert text.decode(text.encode("hello")) == "hello"
try:
    text.encode_chat([{{"role": "user", "content": "Hi"}}])
except ModelError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == (
        "a chat template needs the package 'jinja2': pip install jinja2\n",
        "",
    )


def test_without_tokenizers_the_extra_is_named() -> None:
    code = "import sys; sys.modules['tokenizers'] = None; import anyengine.text"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ModuleNotFoundError: anyengine.text needs the package 'tokenizers': pip install tokenizers" in (
        result.stderr
    )


def test_templates_are_rendered_as_transformers_renders_them() -> None:
    template = """
{%- for message in messages %}
    {%- if loop.index > 5 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
{%- endfor %}
{% if add_generation_prompt %}
{{ bos_token + strftime_now('%Y')[:2] }}
{% endif %}
"""
    shown = ChatTemplate(template, {"bos_token": "B"}).render(
        MESSAGES, tools=None, add_generation_prompt=True, variables={}
    )
    assert shown == '{"role": "user", "content": "Hi <there>"}B20\n'


def test_variables_reach_the_template() -> None:
    template = "{{ enable_thinking }} {{ add_generation_prompt }} {{ bos_token }} {{ documents is none }}"
    text = ModelText(kinds.byte_level(), chat_templates={"default": template}, template_variables={"bos_token": "B"})
    assert chat(text, enable_thinking=False, add_generation_prompt=False) == "False False B True"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content }}",
        "{% macro show(tools) %}{{ tools }}{% endmacro %}{{ messages[0].content }}",
        "{% if tools and messages[0].role == 'system' %}{{ tools }}{% endif %}{{ messages[0].content }}",
    ],
    ids=["not named", "of a macro", "elsewhere"],
)
def test_tools_that_a_template_leaves_out_are_refused(template: str) -> None:
    text = ModelText(kinds.byte_level(), chat_templates={"default": template})
    with pytest.raises(RequestRefusedError, match="tools: the model's chat template leaves them out"):
        text.encode_chat(MESSAGES, tools=[{"name": "f"}])
    for nothing in (None, []):
        assert text.decode(text.encode_chat(MESSAGES, tools=nothing)) == MESSAGES[0]["content"]


@pytest.mark.parametrize(
    "template",
    [
        "{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools | tojson }}",
        "{% set tools = tools or [] %}{{ tools | tojson }}",
        "{{ tools | tojson if tools else raise_exception('no tools') }}",
    ],
    ids=["set if it is not there", "set to itself", "refuses a chat without"],
)
def test_tools_that_a_template_shows(template: str) -> None:
    text = ModelText(kinds.byte_level(), chat_templates={"default": template})
    assert chat(text, tools=[{"name": "f"}]) == '[{"name": "f"}]'


def test_variables_that_a_template_does_not_refer_to_are_refused() -> None:
    template = "{% set own = 1 %}{{ strftime_now('%Y') }}{{ bos_token }}{{ enable_thinking }}{{ documents }}"
    text = ModelText(kinds.byte_level(), chat_templates={"default": template}, template_variables={"bos_token": "B"})
    expected = (
        r"enable_thinkin=False: the model's chat template does not refer to it; it knows documents, enable_thinking$"
    )
    with pytest.raises(RequestRefusedError, match=expected):
        text.encode_chat(MESSAGES, enable_thinkin=False)
    for name in ("own", "range"):
        with pytest.raises(RequestRefusedError, match=f"{name}=1: the model's chat template does not refer to it"):
            text.encode_chat(MESSAGES, **{name: 1})
    text.encode_chat(MESSAGES, enable_thinking=False, documents=None)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only assistants may speak') }}", "refuses this conversation: only assistants may speak"),
        ("{{ messages[0].content + 1 }}", "refuses this conversation"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_a_template_that_refuses_or_attacks(template: str, message: str) -> None:
    with pytest.raises(RequestRefusedError, match=message):
        ChatTemplate(template, {}).render(MESSAGES, tools=None, add_generation_prompt=True, variables={})


def test_a_malformed_template() -> None:
    with pytest.raises(ModelError, match="chat template is malformed"):
        ModelText(kinds.byte_level(), chat_templates={"default": "{% if %}"}).encode_chat(MESSAGES)
