"""The schema knows every kind of message, and the check against it can fail."""

from __future__ import annotations

import re
from typing import Any

import cbor2
import numpy
import pytest
from cddl_verifier import schema_diagnostics
from tests.protocol import cddl, strategies
from tests.protocol.bad_features import BAD_FEATURES
from tests.protocol.cddl import RULES, SCHEMA, Direction, SchemaViolation, validate_message, validate_record
from tests.protocol.machines import messages_to_client, messages_to_engine

from anyengine.params import _SAMPLING_CHECKS, SamplingParams
from anyengine.protocol import arrays, cbor, messages, outputs
from anyengine.protocol.bootstrap import Bootstrap
from anyengine.protocol.messages import PROTOCOL_VERSION
from anyengine.protocol.replies import Outputs, Tokens
from anyengine.protocol.requests import Add, Utility
from anyengine.protocol.sampling import NO_OPTIONS

TEXT = SCHEMA.read_text()


def test_the_schema_is_valid_cddl() -> None:
    assert schema_diagnostics(SCHEMA) == ()
    assert max(map(len, TEXT.splitlines())) <= 120


def test_each_kind_has_its_rule_and_each_rule_its_kind() -> None:
    assert set(RULES["to_engine"]) == set(messages._FROM_CLIENT)
    assert set(RULES["to_client"]) == set(messages._FROM_ENGINE)
    assert cddl.TOKENS == Tokens.KIND
    assert re.search(rf"^;     {Tokens.KIND.hex()} +\(no CBOR\) +PUSH", TEXT, re.MULTILINE)
    documented = dict(re.findall(r"^;     ([0-9A-Z_]+) +([a-z-]+) +(?:ROUTER|DEALER|PUSH)", TEXT, re.MULTILINE))
    table = {**RULES["to_engine"], **RULES["to_client"]}
    assert documented == {(kind.decode() if len(kind) > 1 else kind.hex()): rule for kind, rule in table.items()}


def test_what_the_schema_says_in_words_is_what_the_code_does() -> None:
    assert f"anyengine, version {PROTOCOL_VERSION}, in CDDL" in TEXT
    assert f"but {cbor.ARRAY_TAG}" in TEXT
    assert f"#6.{cbor.ARRAY_TAG}" in TEXT
    assert TEXT.count(f"{arrays.INLINE_LIMIT:,} bytes") == 2
    assert f"a depth of at most {cbor.MAX_DEPTH - 1} " in TEXT


def test_the_schema_names_every_field_there_is() -> None:
    def fields(rule: str) -> set[str]:
        body = re.search(rf"^{rule} = {{\n(.*?)^}}", TEXT, re.MULTILINE | re.DOTALL)
        assert body is not None
        return set(re.findall(r"^    (?:\? )?(\w+):", body[1], re.MULTILINE))

    assert fields("sampling-parameters") == set(_SAMPLING_CHECKS)
    assert fields("output-details") == set(outputs._DETAIL_TYPES)
    assert fields("ready") == set(strategies.EngineInfo.__dataclass_fields__)
    dtypes = re.search(r"^torch-dtype =\n(.*?)\n\n", TEXT, re.MULTILINE | re.DOTALL)
    assert dtypes is not None
    assert set(re.findall(r'"(\w+)"', dtypes[1])) == set(arrays._TORCH_ITEMSIZE)


@pytest.mark.parametrize(
    ("direction", "message"),
    [("to_engine", message) for message in messages_to_engine().values()]
    + [("to_client", message) for message in messages_to_client().values()],
    ids=lambda value: type(value).__name__,
)
def test_a_message_with_a_field_too_few_or_too_many_violates_the_schema(direction: Direction, message: Any) -> None:
    kind, body = (bytes(frame) for frame in message.encode())
    validate_message([kind, body], direction)
    fields = cbor2.loads(body)
    wrong = [{**fields, "another": 1}, {}] if isinstance(fields, dict) else [[*fields, None], fields[:-1]]
    for changed in (*wrong, None, 5):
        with pytest.raises(SchemaViolation):
            validate_message([kind, cbor2.dumps(changed)], direction)


TAG = cbor.ARRAY_TAG
WRONG: list[tuple[str, Any]] = [
    ("add", [-1, None, b"", None, {}, {}]),
    ("add", [1, None, "text", None, {}, {}]),
    ("add", [1, None, None, None, {}, {}]),
    ("add", [1, None, b"", cbor2.CBORTag(TAG, ["numpy", "|u1", [1, 1], b"a"]), {}, {}]),
    ("add", [1, None, None, cbor2.CBORTag(TAG, ["numpy", "|u1", [1], b"a"]), {}, {}]),
    ("add", [1, None, None, cbor2.CBORTag(TAG + 1, ["numpy", "|u1", [1, 1], b"a"]), {}, {}]),
    ("add", [1, None, b"", None, {"temprature": 1}, {}]),
    ("add", [1, None, b"", None, {"temperature": -1}, {}]),
    ("add", [1, None, b"", None, {"top_p": 0}, {}]),
    ("add", [1, None, b"", None, {"top_p": 1.5}, {}]),
    ("add", [1, None, b"", None, {"max_tokens": 0}, {}]),
    ("add", [1, None, b"", None, {"max_tokens": 2**32}, {}]),
    ("add", [1, None, b"", None, {"max_tokens": 1.0}, {}]),
    ("add", [1, None, b"", None, {"seed": None}, {}]),
    ("add", [1, None, b"", None, {"seed": 2**63}, {}]),
    ("add", [1, None, b"", None, {"stop_token_ids": [1]}, {}]),
    ("add", [1, None, b"", None, {"allowed_token_ids": b""}, {}]),
    ("add", [1, None, b"", None, {"logit_bias": {"1": 1}}, {}]),
    ("add", [1, None, b"", None, {"structured_outputs": {"json": "{}", "regex": "a"}}, {}]),
    ("add", [1, None, b"", None, {"structured_outputs": {}}, {}]),
    ("add", [1, None, b"", None, {"extra": {1: 1}}, {}]),
    ("add", [1, None, b"", None, {}, {"prio": 1}]),
    ("add", [1, None, b"", None, {}, {"priority": 2**31}]),
    ("add", [1, None, b"", None, {}, {"priority": 1.0}]),
    ("add", [1, None, b"", None, {}, {"cache_salt": ""}]),
    ("add", [1, None, b"", None, {}, {"lora": {"lora_name": "a", "lora_int_id": 0, "lora_path": "/a"}}]),
    ("add", [1, None, b"", None, {}, {"lora": {"lora_name": "a", "lora_int_id": 1}}]),
    ("add", [1, None, b"", None, {}, {"pooling": {"dimensions": None}}]),
    *(("add", [1, None, bytes(12), None, {}, {"features": features}]) for features in BAD_FEATURES.values()),
    ("add", [1, b"", None, cbor2.CBORTag(TAG, ["numpy", "|u1", [1, 1], b"a"]), {}, {}]),
    ("utility", [1, "method", {}]),
    ("utility", [1, "method", [cbor2.undefined]]),
    ("utility", [1, "method", [{b"key": 1}]]),
    ("utility", [1, "method", [{1.5: 1}]]),
    ("utility", [1, "method", [cbor2.CBORTag(1, 1)]]),
    ("utility", [1, "method", [cbor2.CBORTag(TAG, ["numpy", "O", [1], b"a"])]]),
    ("utility", [1, "method", [cbor2.CBORTag(TAG, ["numpy", "|u1", [1] * 65, b"a"])]]),
    ("utility", [1, "method", [cbor2.CBORTag(TAG, ["torch", "|u1", [1], b"a"])]]),
    ("utility", [1, "method", [cbor2.CBORTag(TAG, ["torch", "uint8", [-1], b"a"])]]),
    ("init", [1, 1, "", "", {1: 1}]),
    ("shutdown", ["later"]),
    ("ping", [-1]),
    ("hello", [1, "token", 1, 1]),
    ("hello", [1, b"token", 1, 2**16]),
    ("progress", ["stage", 1]),
    ("ready", {"engine": "a", "version": "1"}),
    ("ready", {"engine": "a", "version": "1", "max_model_len": 5, "another": 1}),
    ("ready", {"engine": "a", "version": "1", "max_model_len": -5}),
    ("ready", {"engine": "a", "version": "1", "max_model_len": 5, "utilities": [1]}),
    ("ready", {"engine": "a", "version": "1", "max_model_len": 5, "prompt_embeds": 1}),
    ("ready", {"engine": "a", "version": "1", "max_model_len": 5, "max_logprobs": -2}),
    ("outputs", [1, 1, 1, b"", None, b"", {"0": {}}]),
    ("outputs", [1, 1, 1, b"", None, b"", {0: {"finish_reason": "finished"}}]),
    ("outputs", [1, 1, 1, b"", None, b"", {0: {"stop_reason": 1.5}}]),
    ("outputs", [1, 1, 1, b"", None, b"", {0: {"logprobs": [b"", b""]}}]),
    ("outputs", [1, 1, 1, b"", None, b"", {0: {"pooling_output": None}}]),
    ("utility-result", [1, 1, 1, ["Error", "boom", None], 5]),
    ("utility-result", [1, 1, 1, ["Error", "boom"], None]),
    ("stats", [1, 1, {"a": "1"}]),
    ("stats", [1, 1, {"a": True}]),
    ("stats", [1, 1, {1: 1}]),
    ("dead", [1, 1, "Error", "boom", None]),
    ("bootstrap", ["address", 1, b"token", ["a", "b", "c"], None]),
    ("bootstrap", ["address", 1, b"token", [b"a" * 40] * 3, None]),
    ("bootstrap", ["address", 1, b"token", ["a" * 40] * 2, None]),
    ("bootstrap", ["address", 1, b"token", None, [1]]),
    ("bootstrap", ["address", 1, b"token", None, -1]),
    ("bootstrap", ["address", 1, b"token", None, [], None]),
    ("bootstrap", ["address", True, b"token", None, None]),
    ("bootstrap", ["address", 1, "token", None, None]),
    ("bootstrap", [b"address", 1, b"token", None, None]),
    ("bootstrap", ["address", 2**16, b"token", None, None]),
    ("exception-record", ["Error", "boom", None]),
]


@pytest.mark.parametrize(("rule", "body"), WRONG, ids=[f"{rule}-{index}" for index, (rule, _) in enumerate(WRONG)])
def test_what_a_message_must_not_be_violates_the_schema(rule: str, body: Any) -> None:
    with pytest.raises(SchemaViolation, match=rule):
        validate_record(rule, cbor2.dumps(body))


@pytest.mark.parametrize(("rule", "body"), WRONG, ids=[f"{rule}-{index}" for index, (rule, _) in enumerate(WRONG)])
def test_what_violates_the_schema_does_not_decode(rule: str, body: Any) -> None:
    if rule == "exception-record":
        return
    if rule == "bootstrap":
        with pytest.raises(cbor.ProtocolError):
            Bootstrap.decode(cbor2.dumps(body))
    for direction, decode in (("to_engine", messages.decode_from_client), ("to_client", messages.decode_from_engine)):
        for kind, name in RULES[direction].items():  # type: ignore[index]
            if name == rule:
                with pytest.raises(cbor.ProtocolError):
                    decode([kind, cbor2.dumps(body)])


def test_frames_that_do_not_belong_together_violate_the_schema() -> None:
    call = Utility(1, "method", [numpy.zeros(2**17, dtype="u1"), numpy.zeros(2**18, dtype="u1")])
    frames = call.encode()
    assert len(frames) == 4
    validate_message(frames, "to_engine")
    for wrong in (frames[:1], frames[:2], frames[:3], [*frames, b""], [b"\x77", frames[1]], [b"", b""], []):
        with pytest.raises(SchemaViolation):
            validate_message(wrong, "to_engine")
    with pytest.raises(SchemaViolation):
        validate_message(frames, "to_client")
    step = Outputs(1, 2, 3, strategies.large_step(20000)).encode()
    validate_message(step, "to_client")
    with pytest.raises(SchemaViolation, match="no multiple of 8"):
        validate_message([*step[:2], step[2][:-1], *step[3:]], "to_client")
    add = Add(1, [range(3)], None, SamplingParams(), NO_OPTIONS).encode()
    with pytest.raises(SchemaViolation, match="no multiple of 4"):
        validate_message([add[0], cbor2.dumps([1, None, b"abc", None, {}, {}])], "to_engine")


def test_the_exception_record_of_a_crash_follows_the_schema() -> None:
    validate_record("exception-record", cbor.encode_plain(["ValueError", "boom", "Traceback ..."]))


def test_the_parsed_schema_is_kept() -> None:
    assert cddl.schema() is cddl.schema()
