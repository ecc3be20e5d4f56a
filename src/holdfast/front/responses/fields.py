"""The fields of POST /v1/responses: their types, the refusals of unsupported fields, the tools, and
the generation request that the fields ask for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    with_config,
)
from typing_extensions import TypedDict

from holdfast.config import LimitsSettings
from holdfast.front.openai.fields import KNOWN, JsonSchemaFormat, SamplingFields
from holdfast.front.request import (
    ChatPrompt,
    GenerationRequest,
    OutputFormat,
    ToolChoice,
    new_request_id,
)
from holdfast.front.responses.hosted_items import TOOL_ITEMS, UPDATE, is_client_item, is_left_out
from holdfast.front.responses.items import (
    SUMMARY_TURN,
    InputItem,
    asks_for_compaction,
    conversation,
    items_of,
    kind_of,
    model_name,
    summary_options,
    summary_seal,
)
from holdfast.front.server.context import RequestContext
from holdfast.front.server.fields import (
    MANY,
    ONE,
    STRICT,
    TAG_MARK,
    EffortWord,
    FunctionName,
    FunctionParameters,
    MaxTokens,
    ReasoningOptions,
    StrictArguments,
    TextOrMany,
    UnsupportedFields,
    checked_definitions,
    checked_tool_choice,
    log_once,
    optional,
    refuse_above,
    refuse_too_many,
    thinking_of,
)
from holdfast.front.server.problem import RequestRefused, invalid_field, missing_field
from holdfast.front.server.services import model_of

# features of OpenAI's own service
_HOSTED_FIELDS = ("prompt", "context_management", "moderation", "access_programs", "image")
# name of a field in other APIs → its name here
_RENAMED = {
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
    "system": "instructions",
    "verbosity": "text.verbosity",
}
UNSUPPORTED = UnsupportedFields(
    neutral={
        **KNOWN,
        **dict.fromkeys((*_HOSTED_FIELDS, *_RENAMED), ([], {})),
        **dict.fromkeys(("stop", "functions"), ([], "")),
        "n": (1,),
        "logprobs": (False,),
    },
    reasons={
        **dict.fromkeys(_HOSTED_FIELDS, "this field is part of OpenAI's own service"),
        **{name: f"the field is called `{other}` here" for name, other in _RENAMED.items()},
        "n": "a response has only one answer",
        "stop": "the Responses API has no stop strings",
        "functions": "the field is called `tools` here",
        "function_call": "the field is called `tool_choice` here",
        "logprobs": 'use `include`: ["message.output_text.logprobs"]',
    },
)
# values of `include`
_LOGPROBS = "message.output_text.logprobs"
_SEALED_THOUGHTS = "reasoning.encrypted_content"
_SUPPORTED_TOOLS = ("function", "custom")
_ITEM, _TOOLS, _UPDATE, _HOSTED_ITEM = (
    TAG_MARK + name for name in ("item", "tools", "update", "hosted")
)
MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
ResponseMetadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class TextFormat(JsonSchemaFormat):
    """Text, any JSON object, or JSON that matches a schema."""

    type: Literal["text", "json_object", "json_schema"]


class TextOptions(BaseModel):
    """Options of the visible text."""

    model_config = STRICT

    format: TextFormat | None = optional("Text or JSON.")
    verbosity: Annotated[str, Field(max_length=20)] | None = optional(
        "Accepted, but has no effect."
    )

    def output_format(self, *, field: str = "text.format") -> OutputFormat | None:
        """Return the format to enforce; None: any text. Raises RequestRefused if a schema is
        missing.
        """
        text_format = self.format
        if text_format is None or text_format.type == "text":
            return None
        if text_format.type == "json_object":
            return OutputFormat(kind="json_object", field=field)
        field = f"{field}.schema"
        if text_format.schema_ is None:
            raise missing_field(field)
        return OutputFormat(kind="json_schema", schema=text_format.schema_, field=field)


def _checked_format(fields: dict[str, Any]) -> dict[str, Any]:
    """Validator for a TextFormat that stays a dict, because it is stored with its item."""
    try:
        TextFormat.model_validate(fields)
    except ValidationError as error:
        fault, *_ = error.errors()
        path = ".".join(map(str, fault["loc"]))
        raise ValueError(f"{path}: {fault['msg']}") from None
    return fields


class ResponseReasoning(ReasoningOptions):
    """Whether and how much to think, and how thinking is shown."""

    summary: Literal["auto", "concise", "detailed"] | None = optional(
        "Show thoughts as a summary instead of as content. The summary is the whole thought."
    )
    generate_summary: Literal["auto", "concise", "detailed"] | None = optional(
        "Older name for summary."
    )


class ResponseStreamOptions(BaseModel):
    """Options of a stream."""

    model_config = STRICT

    include_obfuscation: bool | None = optional("Accepted, but has no effect.")


class ConversationName(BaseModel):
    """A reference to a conversation by its id."""

    model_config = STRICT

    id: Annotated[str, Field(min_length=1)]


ConversationField = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag(ONE)]
    | Annotated[ConversationName, Tag(MANY)],
    Discriminator(lambda value: ONE if isinstance(value, str) else MANY),
]


@with_config(STRICT)
class CustomFormat(TypedDict):
    """The format that the text of a custom tool must have."""

    type: Literal["text", "grammar"]
    syntax: NotRequired[Literal["lark", "regex"]]
    definition: NotRequired[str]


@with_config(STRICT)
class NamespacedTool(TypedDict):
    """A tool in a namespace."""

    type: str
    name: NotRequired[FunctionName]
    description: NotRequired[str | None]
    parameters: NotRequired[FunctionParameters]
    strict: NotRequired[StrictArguments]
    format: NotRequired[
        Annotated[
            CustomFormat | None, Field(description="For a custom tool: the format of the text.")
        ]
    ]


@with_config(STRICT)
class ResponseTool(NamespacedTool):
    """A function, custom tool or namespace. Other types are skipped: the server cannot run them."""

    tools: NotRequired[
        Annotated[
            list[NamespacedTool], Field(fail_fast=True, description="For a namespace: its tools.")
        ]
    ]


@with_config(STRICT)
class ToolNamed(TypedDict):
    """A reference to a tool by its name."""

    type: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str | None]


@with_config(STRICT)
class ChosenTool(ToolNamed):
    """The tool that must be called, or (`allowed_tools`) the tools that may be called."""

    mode: NotRequired[Literal["auto", "required"]]
    tools: NotRequired[Annotated[list[ToolNamed], Field(min_length=1, fail_fast=True)]]


ResponseTools = Annotated[list[ResponseTool], Field(fail_fast=True)]
ResponseToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(ONE)] | Annotated[ChosenTool, Tag(MANY)],
    Discriminator(lambda value: MANY if isinstance(value, dict) else ONE),
]


@with_config(STRICT)
class ToolsItem(TypedDict):
    """An item that adds tools for the rest of the conversation."""

    type: Literal["additional_tools", "tool_search_output"]
    id: NotRequired[str | None]
    tools: ResponseTools


@with_config(STRICT)
class EffortUpdate(TypedDict):
    """The reasoning effort from now on."""

    effort: NotRequired[EffortWord | None]


@with_config(STRICT)
class FormatUpdate(TypedDict):
    """The format of answers from now on."""

    format: Annotated[dict[str, Any], AfterValidator(_checked_format)]


@with_config(STRICT)
class ConfigurationUpdate(TypedDict):
    """An item that replaces `reasoning.effort` or `text.format` until the next such item."""

    type: Literal["configuration_update"]
    id: NotRequired[str | None]
    reasoning: NotRequired[EffortUpdate | None]
    text: NotRequired[FormatUpdate | None]


@with_config(STRICT)
class HostedItem(TypedDict):
    """A call of one of OpenAI's own tools, or its output, made on another server."""

    type: str
    id: NotRequired[str | None]


def _item_tag(value: Any) -> str:
    """The discriminator of `AnyItem`."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return _ITEM
    if kind in TOOL_ITEMS:
        return _TOOLS
    if kind == UPDATE:
        return _UPDATE
    return _HOSTED_ITEM if is_client_item(kind) or is_left_out(kind) else _ITEM


AnyItem = Annotated[
    Annotated[InputItem, Tag(_ITEM)]
    | Annotated[ToolsItem, Tag(_TOOLS)]
    | Annotated[ConfigurationUpdate, Tag(_UPDATE)]
    | Annotated[HostedItem, Tag(_HOSTED_ITEM)],
    Discriminator(_item_tag),
]
Input = TextOrMany[AnyItem]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shows:
    """What the client wants to receive besides the text."""

    logprobs: bool = False  # log-probabilities of the tokens
    sealed_thoughts: bool = False  # thoughts are also sent as encrypted_content
    summaries: bool = False  # thoughts are sent as summary instead of as content


class ResponseRequest(SamplingFields):
    """A request to generate a response to an input."""

    session_headers = ("session-id", "session_id")  # of current and earlier versions of Codex
    input: Input | None = optional("A text, or the conversation as items, oldest first.")
    instructions: str | None = optional("A system message before the input.")
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: MaxTokens | None = optional(
        "Maximum number of tokens to generate, including thoughts."
    )
    tools: ResponseTools | None = optional("The tools that the model may call.")
    tool_choice: ResponseToolChoice | None = optional(
        "Whether the model may, must or must not call tools, and which tools."
    )
    parallel_tool_calls: bool | None = optional("False: at most one call per answer.")
    max_tool_calls: Annotated[int, Field(ge=1)] | None = optional(
        "Has no effect: it limits hosted tools, which this server does not have."
    )
    reasoning: ResponseReasoning | None = optional(
        "How much to think first, and how thinking is shown."
    )
    text: TextOptions | None = optional("The format of the answer.")
    include: Annotated[list[str], Field(fail_fast=True)] | None = optional(
        f"What to add: {_SEALED_THOUGHTS}, {_LOGPROBS}. Other values concern hosted tools and add "
        "nothing."
    )
    top_logprobs: Annotated[int, Field(ge=0)] | None = optional(
        "Number of most likely tokens to list at each position."
    )
    store: bool | None = optional("False: the response is not stored and cannot be retrieved.")
    previous_response_id: Annotated[str, Field(min_length=1)] | None = optional(
        "The stored response to continue. Its input and output come first, its instructions do not."
    )
    conversation: ConversationField | None = optional(
        "Continue a conversation. The input and output are added to the conversation."
    )
    background: bool | None = optional(
        "Return at once, and generate the response in the background."
    )
    metadata: ResponseMetadata | None = optional("Returned unchanged in the response.")
    client_metadata: dict[str, Any] | None = optional("Accepted, but has no effect.")
    background_options: dict[str, Any] | None = optional("Accepted, but has no effect.")

    def request(
        self,
        context: RequestContext,
        *,
        tools: OfferedTools,
        earlier_items: Sequence[Mapping[str, Any]],
        only_counts: bool = False,
    ) -> GenerationRequest:
        """Return what to generate, or the prompt whose tokens to count. Raises RequestRefused.

        tools: the result of `tools_to_offer`.
        earlier_items: the stored items that the request continues.
        only_counts: only the prompt is needed, to count its tokens.
        """
        items = [*earlier_items, *items_of(self.input)]
        compacts = asks_for_compaction(items)
        if compacts:
            items.pop()
        if not items:
            raise missing_field("input")
        model = model_of(context.services, self.model)
        messages, has_images = conversation(
            items,
            instructions=self.instructions,
            unseal=context.seal.decrypt,
            open_summary=summary_seal(context.seal, model).decrypt,
            earlier_count=len(earlier_items),
        )
        reasoning, output_format = self._configuration(items, earlier_count=len(earlier_items))
        choice = choice_of(
            self.tool_choice, tools=tools, parallel=self.parallel_tool_calls is not False
        )
        thinking = thinking_of(values={"reasoning": reasoning})
        if compacts:
            messages = (*messages, SUMMARY_TURN)
            answer_options = summary_options(max_tokens=self.max_output_tokens, thinking=thinking)
        else:
            answer_options = {
                "max_tokens": self.max_output_tokens,
                "want_logprobs": self.shows().logprobs,
                "top_logprobs": self.top_logprobs or 0,
                "tool_choice": choice,
                "thinking": thinking,
                "output_format": output_format,
            }
        # a count belongs to no session
        options = {"tenant": context.tenant} if only_counts else self.request_options(context)
        return GenerationRequest(
            request_id=new_request_id("resp_"),
            model=model,
            prompt=ChatPrompt(
                messages=messages,
                has_images=has_images,
                tools=tools.definitions,
                tool_fields=tools.fields,
            ),
            prompt_field="input",
            **answer_options,
            **options,
        )

    def _configuration(
        self, items: Sequence[Mapping[str, Any]], *, earlier_count: int
    ) -> tuple[ReasoningOptions | None, OutputFormat | None]:
        """Return the reasoning effort and the format of the answer: each from the last
        `configuration_update` that sets it, or else from the request.

        earlier_count: number of leading items that come from the store, not from the request.
        """
        reasoning: ReasoningOptions | None = self.reasoning
        output_format = self.text.output_format() if self.text is not None else None
        for number, item in enumerate(items):
            if kind_of(item) != UPDATE:
                continue
            if item.get("reasoning"):
                effort = {"effort": item["reasoning"].get("effort")}
                reasoning = (reasoning or ReasoningOptions()).model_copy(update=effort)
            if item.get("text"):
                text = TextOptions.model_validate(item["text"])
                output_format = text.output_format(
                    field=f"input.{number - earlier_count}.text.format"
                )
        return reasoning, output_format

    def tools_to_offer(
        self, earlier_items: Sequence[Mapping[str, Any]], *, limits: LimitsSettings
    ) -> OfferedTools:
        """Return the tools to offer to the model, from the request and from items of the
        conversation. Raises RequestRefused.

        earlier_items: the stored items that the request continues.
        """
        items = [*earlier_items, *items_of(self.input)]
        added_tools = [
            (f"input.{number - len(earlier_items)}.tools.{inner}", tool)
            for number, item in enumerate(items)
            if kind_of(item) in TOOL_ITEMS
            for inner, tool in enumerate(item["tools"])
        ]
        return offered_tools(self.tools or (), limits=limits, added_tools=added_tools)

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed. A background answer is stored that way."""
        return super().streams or bool(self.background)

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation to continue; None if the request continues none."""
        conversation = self.conversation
        return conversation.id if isinstance(conversation, ConversationName) else conversation

    @property
    def stores(self) -> bool:
        """Whether to store the response."""
        return self.store is not False

    def shows(self) -> Shows:
        """What the client wants to receive besides the text."""
        included = self.include or ()
        reasoning = self.reasoning
        return Shows(
            logprobs=_LOGPROBS in included or bool(self.top_logprobs),
            sealed_thoughts=_SEALED_THOUGHTS in included,
            summaries=bool(reasoning and (reasoning.summary or reasoning.generate_summary)),
        )

    def refuse_what_cannot_be_served(self, limits: LimitsSettings) -> None:
        """Raise RequestRefused for unsupported requests that the field types do not exclude."""
        UNSUPPORTED.refuse(self.model_extra)
        refuse_above(self.top_logprobs, limits.max_top_logprobs, field="top_logprobs")
        if self.conversation_id and self.previous_response_id:
            reason = "`previous_response_id` is not allowed together with `conversation`"
            raise RequestRefused(reason, field="previous_response_id")
        if self.background and not self.stores:
            reason = "`background` requires `store`: otherwise, the response cannot be retrieved"
            raise RequestRefused(reason, field="background")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTool:
    """A tool, identified as the client names it."""

    name: str  # without the namespace
    namespace: str = ""  # empty if the tool is in no namespace
    is_custom: bool = False  # takes a text instead of arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTools:
    """The tools of a request that are offered to the model, and the client's names for them."""

    definitions: tuple[dict[str, Any], ...] = ()  # in OpenAI's format
    fields: tuple[str, ...] = ()  # for each definition, the request field that contains its schema
    # the client's tool for each name that the model sees
    by_model_name: Mapping[str, ClientTool] = field(default_factory=dict)
    # names of the functions for which the client did not set `strict`; as in OpenAI's API, that
    # means that their arguments are held to their schemas
    enforced_names: tuple[str, ...] = ()

    def client_tool(self, model_name: str) -> ClientTool:
        """Return the tool that has this name in the prompt.

        For an unknown name, returns a function with that name.
        """
        return self.by_model_name.get(model_name) or ClientTool(name=model_name)


def offered_tools(
    tools: Sequence[ResponseTool],
    *,
    limits: LimitsSettings,
    added_tools: Sequence[tuple[str, ResponseTool]] = (),
) -> OfferedTools:
    """Return the tools to offer to the model. Raises RequestRefused.

    added_tools: tools from items of the conversation, each with the request field that has it. A
        tool whose name is already taken is skipped.
    """
    refuse_too_many(tools, limits.max_tools, field="tools")
    offered = list(_supported_tools((f"tools.{number}", tool) for number, tool in enumerate(tools)))
    names = {function["name"] for _, _, function in offered}
    for tool_field, client_tool, function in _supported_tools(added_tools):
        if function["name"] not in names:
            names.add(function["name"])
            offered.append((tool_field, client_tool, function))
    refuse_too_many(offered, limits.max_tools, field="tools")
    tool_fields = [tool_field for tool_field, _, _ in offered]
    definitions = [{"type": "function", "function": function} for _, _, function in offered]
    return OfferedTools(
        definitions=checked_definitions(
            definitions, fields=tool_fields, most_parts=limits.max_tool_parts
        ),
        fields=tuple(f"{tool_field}.parameters" for tool_field in tool_fields),
        by_model_name={function["name"]: tool for _, tool, function in offered},
        enforced_names=tuple(
            function["name"] for _, _, function in offered if "strict" not in function
        ),
    )


def choice_of(
    choice: str | ChosenTool | None, *, tools: OfferedTools, parallel: bool
) -> ToolChoice:
    """Interpret `tool_choice`. Raises RequestRefused for a tool that is not among `tools`."""
    definitions: Sequence[Mapping[str, Any]] = tools.definitions
    names: list[str] = []
    mode: Any = choice or "auto"
    choice_field = "tool_choice"
    if isinstance(choice, dict):
        if choice.get("type") != "allowed_tools":
            mode = "required"
            names = [_chosen_name(choice, choice_field)]
            choice_field = "tool_choice.name"
        else:
            mode = choice.get("mode", "auto")
            names = _allowed_names(choice)
            if names:
                choice_field = "tool_choice.tools"
            else:  # only hosted tools are named, and those are not offered
                definitions = ()
                mode = "none" if mode == "auto" else mode
    tool_choice = checked_tool_choice(
        mode, names, tools=definitions, parallel=parallel, field=choice_field
    )
    if tool_choice.mode == "none":
        return tool_choice
    return msgspec.structs.replace(tool_choice, enforced_names=tools.enforced_names)


def _allowed_names(choice: ChosenTool) -> list[str]:
    """The names of the tools that `allowed_tools` allows, without hosted tools."""
    if "tools" not in choice:
        raise missing_field("tool_choice.tools")
    return [
        _chosen_name(tool, f"tool_choice.tools.{number}")
        for number, tool in enumerate(choice["tools"])
        if tool.get("type", "function") in _SUPPORTED_TOOLS
    ]


def _chosen_name(tool: ToolNamed, choice_field: str) -> str:
    """The name by which the model knows a chosen tool. choice_field: the field that chooses it."""
    if (kind := tool.get("type", "function")) not in _SUPPORTED_TOOLS:
        raise invalid_field(
            f"{choice_field}.type",
            "only functions and custom tools can be chosen here",
            code="unsupported_parameter",
            shown=f", not {kind[:40]!r}",
        )
    if not tool.get("name"):
        raise missing_field(f"{choice_field}.name")
    return model_name(tool["name"], tool.get("namespace"))


def _supported_tools(
    tools: Iterable[tuple[str, ResponseTool]],
) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    """Iterate over supported tools: request field, client's tool, and model's function.

    tools: each with the request field that has it.
    """
    for tool_field, tool in tools:
        if tool["type"] != "namespace":
            yield from _supported_tool(tool, tool_field, "")
            continue
        namespace = _name(tool, tool_field)
        for inner, each in enumerate(tool.get("tools", ())):
            yield from _supported_tool(each, f"{tool_field}.tools.{inner}", namespace)


def _supported_tool(
    tool: NamespacedTool, tool_field: str, namespace: str
) -> Iterator[tuple[str, ClientTool, dict[str, Any]]]:
    """Yield a tool as `_supported_tools` does, or nothing if only OpenAI's servers can run it."""
    kind = tool["type"]
    if kind not in _SUPPORTED_TOOLS:
        log_once("skipped tools of type %r, which this server cannot run", kind)
        return
    name = _name(tool, tool_field)
    client_tool = ClientTool(name=name, namespace=namespace, is_custom=kind == "custom")
    function = _custom_function(tool) if client_tool.is_custom else _function(tool)
    yield tool_field, client_tool, {"name": model_name(name, namespace), **function}


def _name(tool: NamespacedTool, tool_field: str) -> str:
    if "name" not in tool:
        raise missing_field(f"{tool_field}.name")
    return tool["name"]


def _function(tool: NamespacedTool) -> dict[str, Any]:
    fields = {key: tool.get(key) for key in ("description", "parameters", "strict")}
    return {key: value for key, value in fields.items() if value is not None}


def _custom_function(tool: NamespacedTool) -> dict[str, Any]:
    """Return a custom tool as a function with one text argument, because models know no other
    tools. Its description contains the text's grammar.
    """
    text_format = tool.get("format") or {"type": "text"}
    definition = text_format.get("definition", "")
    description = tool.get("description") or ""
    if text_format["type"] == "grammar" and definition:
        syntax = text_format.get("syntax", "lark")
        description += f"\n\nThe input has to match this {syntax} grammar:\n{definition}"
    text = {"type": "string", "description": "The whole input of the tool, as it is."}
    if text_format.get("syntax") == "regex":
        text["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    function: dict[str, Any] = {"parameters": parameters}
    if description:
        function = {"description": description.strip(), **function}
    return function
