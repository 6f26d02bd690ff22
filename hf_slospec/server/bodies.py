"""Request bodies: the fields that all APIs share, and completions. Chats are in ``chats.py``.

Bodies have OpenAI's fields, vLLM's extra fields and SLOs. An unknown field is an error.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hf_slospec.request.slo import SLOStage

# fail_fast stops at the first invalid item: errors for a million items would take gigabytes.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
StopString = Annotated[str, Field(min_length=1)]


class ClosedModel(BaseModel):
    """Pydantic model that refuses unknown fields. A field that is null counts as left out, as many
    clients send nulls.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return (
            {name: each for name, each in value.items() if each is not None}
            if isinstance(value, dict)
            else value
        )


class StreamOptions(ClosedModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    # Ignored: OpenAI's padding, which hides token lengths from eavesdroppers
    include_obfuscation: bool = False


class SamplingSettings(ClosedModel):
    """Sampling parameters; the model's generation config has the values of those left out."""

    temperature: float | None = Field(None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, allow_inf_nan=False)


class CommonBody(SamplingSettings):
    """Fields of the bodies of all endpoints that generate tokens, in every API."""

    model: str | None = None
    stream: bool = False
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop_token_ids: Annotated[list[int], Field(fail_fast=True)] | None = None
    min_tokens: int = Field(0, ge=0)
    ignore_eos: bool = False

    # `submit` checks the values of SLOs.
    slo_tpot: float | Annotated[list[SLOStage], Field(fail_fast=True)] | None = Field(
        None, description="Seconds per output token, or stages with SLOs of their own."
    )
    slo_ttft: float | None = Field(None, description="Seconds to the first token.")
    slo_e2e: float | None = Field(
        None, description="Seconds to the last token, of as many as max_tokens."
    )
    priority: int = Field(
        0, ge=-(2**31), lt=2**31, description="Lower is served earlier, as with vLLM."
    )
    best_effort: bool = False
    speculative: bool = Field(True, description="False: one token per step, the same output.")
    cache_salt: str = Field(
        "", description="Share K/V with requests of the same salt only, as with vLLM."
    )

    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    request_id: str | None = None

    @property
    def stages(self) -> list[SLOStage]:
        """Return the stages of ``slo_tpot``, none if it is a number."""
        return self.slo_tpot if isinstance(self.slo_tpot, list) else []

    @property
    def common(self) -> dict[str, Any]:
        """Return the fields of CommonBody that the client sent."""
        return {
            name: getattr(self, name)
            for name in CommonBody.model_fields
            if name in self.model_fields_set
        }


class JSONSchema(ClosedModel):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None  # ignored: outputs always follow the schema


class ResponseFormat(ClosedModel):
    """Format of the output: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs a json_schema, and the other types take none")
        return self

    @property
    def schema_to_follow(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output; None for text."""
        if self.json_schema is not None:
            return self.json_schema.schema_
        return {"type": "object"} if self.type == "json_object" else None


class SamplingBody(CommonBody):
    """Fields that completions and chats have in common."""

    prompt_field: ClassVar[str]  # name of the field that has the prompt
    default_max_tokens: ClassVar[int]

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=0)
    n: int = Field(1, ge=1)
    stop: StopString | Annotated[list[StopString], Field(fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool | None = None
    store: bool | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options has no effect without stream")
        return self

    @model_validator(mode="after")
    def _check_schema_ends(self) -> SamplingBody:
        if self.json_schema is not None and (self.ignore_eos or self.min_tokens):
            raise ValueError(
                f"{self.schema_field} ends the output with the JSON; leave ignore_eos and min_tokens out"
            )
        return self

    @property
    def json_schema(self) -> dict[str, Any] | None:
        """Return the JSON schema of the output; None for text."""
        return None if self.response_format is None else self.response_format.schema_to_follow

    @property
    def schema_field(self) -> str:
        """Return the name of the field that ``json_schema`` comes from."""
        return "response_format"

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_top_logprobs(self) -> int | None:
        """Return how many of the most likely tokens get log probabilities at each position, besides
        the output's token; None: no log probabilities at all.
        """
        raise NotImplementedError


class CompletionBody(SamplingBody):
    prompt_field = "prompt"
    default_max_tokens = 16  # OpenAI's default

    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(min_length=1, fail_fast=True)]
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: bool = False
    logprobs: int | None = Field(None, ge=0)
    best_of: int | None = Field(None, ge=1)
    suffix: Literal[None, ""] = None

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError("best_of must equal n: completions are not ranked")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0, which returns nothing without echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts: list[Any] = [self.prompt] if is_one else list(self.prompt)
        return prompts

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs


class LoadBody(ClosedModel):
    model: str


class DetokenizeBody(ClosedModel):
    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)]
