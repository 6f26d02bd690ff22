"""Forms of message contents that chat templates of published models take."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hf_slospec import InvalidInputError
from hf_slospec.batcher.submission import in_template_form

LLAVA = (
    "{% for message in messages %}{% if message['role'] != 'system' %}{{ message['role'].upper() + ': '}}{% endif %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}{{ content['text'] + ' '}}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
LLAMA_GUARD_1B = (
    "<|start_header_id|>user<|end_header_id|>\n\nTask: Check if there is unsafe content.\n<BEGIN CONVERSATION>\n\n"
    "{% for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('Conversation roles must be user or assistant') }}{% endif %}"
    "{% for content in message['content'] %}{% if content['type'] == 'text' %}"
    "{{ message['role'] | capitalize }}: {{ content['text'] | trim }}\n\n{% endif %}{% endfor %}{% endfor %}"
    "<END CONVERSATION>\n"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(last=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.last == messages|length - 1 and message.role == 'user' and message.content is string and not"
    "(message.content.startswith('<tool_response>')) %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}"
    "{%- set content = '' %}{%- endif %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and reasoning_content %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content + '\\n</think>\\n\\n' + content }}{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"
    "{%- if message.tool_calls %}{%- for tool_call in message.tool_calls %}"
    "{{- '\\n<tool_call>\\n' + (tool_call.function | tojson) + '\\n</tool_call>' }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- elif message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA_31 = (
    "{{- bos_token }}{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system_message = '' %}{%- endif %}"
    "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message + '<|eot_id|>' }}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{- message['content'] | trim + '<|eot_id|>' }}"
    "{%- elif 'tool_calls' in message %}{%- set tool_call = message.tool_calls[0].function %}"
    "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{\"name\": \"' + tool_call.name + '\"}<|eot_id|>' }}"
    "{%- elif message.role == 'tool' or message.role == 'ipython' %}"
    "{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}"
    "{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}{%- else %}"
    "{{- message.content }}{%- endif %}{{- '<|eot_id|>' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
LLAMA_32_VISION = LLAMA_31.replace(
    "{{- message['content'] | trim + '<|eot_id|>' }}",
    "{%- if message['content'] is string %}"
    "{{- message['content'] }}{%- else %}{%- for content in message['content'] %}{%- if content['type'] == 'image' %}"
    "{{- '<|image|>' }}{%- elif content['type'] == 'text' %}{{- content['text'] }}{%- endif %}{%- endfor %}{%- endif %}"
    "{{- '<|eot_id|>' }}",
)
GEMMA_3 = (
    "{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}{%- if messages[0]['content'] is string -%}"
    "{%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}{%- else -%}"
    "{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}{%- endif -%}"
    "{%- set loop_messages = messages[1:] -%}{%- else -%}{%- set first_user_prefix = '' -%}"
    "{%- set loop_messages = messages -%}{%- endif -%}{%- for message in loop_messages -%}"
    "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif -%}"
    "{%- if (message['role'] == 'assistant') -%}{%- set role = 'model' -%}{%- else -%}"
    "{%- set role = message['role'] -%}{%- endif -%}"
    "{{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else '') }}"
    "{%- if message['content'] is string -%}{{ message['content'] | trim }}"
    "{%- elif message['content'] is iterable -%}{%- for item in message['content'] -%}"
    "{%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}{%- elif item['type'] == 'text' -%}"
    "{{ item['text'] | trim }}{%- endif -%}{%- endfor -%}{%- else -%}{{ raise_exception('Invalid content type') }}"
    "{%- endif -%}{{ '<end_of_turn>\n' }}{%- endfor -%}{%- if add_generation_prompt -%}{{'<start_of_turn>model\n'}}"
    "{%- endif -%}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim | e }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PHI_3 = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% endif %}{% endfor %}"


def tokenizer(template):
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = template
    return made


def prompt_of(template, messages):
    options = {"add_generation_prompt": True}
    made = tokenizer(template)
    return made.apply_chat_template(
        in_template_form(made, messages, options), **options, tokenize=False
    )


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


LISTS = {
    "llava": (LLAVA, " "),
    "smolvlm": (SMOLVLM, ""),
    "llama-guard-3-1b": (LLAMA_GUARD_1B, "\n\nUser: "),
}
BOTH = {"gemma-3": (GEMMA_3, ""), "llama-3.2-vision": (LLAMA_32_VISION, "")}
STRINGS = {
    "qwen3": (QWEN3, "\n"), "llama-3.1": (LLAMA_31, "\n"), "mistral": (MISTRAL, "\n"), "chatml": (CHATML, "\n"),
    "phi-3": (PHI_3, "\n"),
}  # fmt: skip
ALL = LISTS | BOTH | STRINGS


@pytest.mark.parametrize("name", ALL)
def test_texts_are_shown_and_parts_joined_as_the_template_does(name):
    template, between = ALL[name]
    for content in ("e", "What is it?", parts("What is it?")):
        text = content if isinstance(content, str) else "What is it?"
        prompt = prompt_of(template, [{"role": "user", "content": content}])
        assert (
            text in prompt
            and "'type'" not in prompt
            and prompt.count("What is it?") == text.count("What is it?")
        )
    assert f"one{between}two" in prompt_of(
        template, [{"role": "user", "content": parts("one", "two")}]
    )


@pytest.mark.parametrize("name", [*LISTS, *BOTH])
def test_whatever_shows_images_shows_texts_beside_them(name):
    image = {"type": "image", "image": "a picture"}
    text = "What is it?"
    chat = [{"role": "user", "content": [image, *parts(text)]}]
    if name not in ("llama-guard-3-1b",):
        chat.insert(0, {"role": "system", "content": "Be brief."})
    prompt = prompt_of(ALL[name][0], chat)
    assert text in prompt and "'type'" not in prompt and ("Be brief." in prompt) == (len(chat) == 2)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
LONG = [
    {"role": "user", "content": "  First\n\n question  "},
    {"role": "assistant", "content": "<think>\nHm, so.\n</think>\n\nFirst answer"},
    {"role": "user", "content": "Second <b>&\t\"question\" 'x' \\n"},
]


@pytest.mark.parametrize("name", [*BOTH, *STRINGS])
def test_no_message_of_an_ordinary_chat_is_refused(name):
    if name == "phi-3":
        return
    assert "First answer" in prompt_of(ALL[name][0], LONG)
    if name not in ("mistral",):
        system = {"role": "system", "content": parts("Be brief.", "Be kind.")}
        assert prompt_of(ALL[name][0], [system, *LONG]).count("Be kind.") == 1


@pytest.mark.parametrize("name", ["qwen3", "llama-3.1", "llama-3.2-vision"])
def test_tool_results_are_shown_in_whatever_form(name):
    for result in ('{"city": "Köln",\n "sky": "\\"blue\\""}', parts("sunny"), "line\nline"):
        chat = [LONG[0], {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]
        chat += [{"role": "tool", "tool_call_id": "1", "content": result}]
        assert "'type'" not in prompt_of(ALL[name][0], chat)


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (PHI_3, [{"role": "system", "content": "Be brief."}, LONG[0]], r"messages\[0\].*'system'"),
        (PHI_3, [LONG[0], {"role": "developer", "content": "Be brief."}], r"messages\[1\].*'developer'"),
        ("{{ messages[-1].content }}", LONG, r"messages\[0\].*'user'"),
        ("Hello", [{"role": "user", "content": "e"}], r"messages\[0\].*'user'"),
        ("{% for m in messages %}{{ m.content[0].text }}{% endfor %}",
         [{"role": "user", "content": parts("one", "two")}], r"messages\[0\].*'user'"),
    ],
)  # fmt: skip
def test_texts_that_a_template_leaves_out_are_refused(template, messages, named):
    with pytest.raises(InvalidInputError, match=named):
        prompt_of(template, messages)


def test_errors_of_the_template_itself_are_kept():
    with pytest.raises(Exception, match="must alternate"):
        prompt_of(MISTRAL, [LONG[0], {"role": "user", "content": parts("again")}])


def test_templates_that_want_texts_of_a_kind_are_tried_with_these():
    template = (
        "{% for m in messages %}{% if not m.content.startswith('en-de:') %}{{ raise_exception('languages?') }}"
        "{% endif %}{{ m.content | trim }}{% endfor %}"
    )
    assert (
        prompt_of(template, [{"role": "user", "content": "en-de: Good\n morning "}])
        == "en-de: Good\n morning"
    )
