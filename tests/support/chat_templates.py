"""Chat templates for tests, each in the manner of a family of models, and no model's own."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = '' %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\n' + system + '<|eot_id|>' }}
{%- for m in messages %}
    {%- if not (m.role == 'ipython' or m.role == 'tool' or 'tool_calls' in m) %}
        {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}
        {{- m['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in m %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name }}
        {{- '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {%- if m.content is mapping or m.content is iterable %}{{- m.content | tojson }}
        {%- else %}{{- m.content }}{%- endif %}{{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}"""

MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for m in turns if m['role'] in ('user', 'assistant') and not m.get('tool_calls') %}
    {%- if (m['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('roles must alternate user/assistant') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for m in turns %}
    {%- if m['role'] == 'user' %}
        {%- if loop.last and system is defined %}{{- '[INST] ' + system + '\n\n' + m['content'] }}
        {%- else %}{{- '[INST] ' + m['content'] }}{%- endif %}{{- '[/INST]' }}
    {%- elif m.get('tool_calls') %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('ids of tool calls must have 9 characters') }}
            {%- endif %}
            {%- set out = call.function | tojson %}{{- out[:-1] + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content | string + '}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('only user, assistant and tool roles are supported') }}
    {%- endif %}
{%- endfor %}"""

GEMMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""


PHI_3 = (
    "{% for m in messages %}{% if m['role'] == 'system' %}<|system|>\n{{ m['content'] }}<|end|>\n"
    "{% elif m['role'] == 'user' %}<|user|>\n{{ m['content'] }}<|end|>\n"
    "{% elif m['role'] == 'assistant' %}<|assistant|>\n{{ m['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

ZEPHYR = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>\n' + m['content'] + eos_token"
    " }}{% elif m['role'] == 'system' %}{{ '<|system|>\n' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'assistant' %}{{ '<|assistant|>\n' + m['content'] + eos_token }}"
    "{% endif %}\n{% if loop.last and add_generation_prompt %}<|assistant|>{% endif %}{% endfor %}"
)

DEEPSEEK = """\
{%- set ns = namespace(system='') %}
{%- for m in messages if m['role'] == 'system' %}
    {%- set ns.system = m['content'] %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for m in messages %}
    {%- if m['role'] == 'user' %}{{- '<|User|>' + m['content'] }}
    {%- elif m['role'] == 'assistant' and 'tool_calls' in m %}
        {%- for call in m['tool_calls'] %}
            {{- '<|tool_call_begin|>' + call['type'] + '<|tool_sep|>' + call['function']['name'] }}
            {{- '\n```json\n' + call['function']['arguments'] + '\n```<|tool_call_end|>' }}
        {%- endfor %}
    {%- elif m['role'] == 'assistant' %}
        {%- set content = m['content'] %}
        {%- set content = content.split('</think>')[-1] %}
        {{- '<|Assistant|>' + content + eos_token }}
    {%- elif m['role'] == 'tool' %}
        {{- '<|tool_output_begin|>' + m['content'] + '<|tool_output_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\n' }}{%- endif %}"""


GPT_OSS = """\
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set developer = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set developer = '' %}{%- set turns = messages %}{%- endif %}
{{- '<|start|>system<|message|>You are ChatGPT.<|end|>' }}
{%- if developer %}
    {{- '<|start|>developer<|message|># Instructions\n\n' + developer + '<|end|>' }}
{%- endif %}
{%- set ns = namespace(name=none) %}
{%- for m in turns %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- set call = m.tool_calls[0].function %}{%- set ns.name = call.name %}
        {{- '<|start|>assistant to=functions.' + call.name }}
        {{- '<|channel|>commentary json<|message|>' + call.arguments | tojson + '<|call|>' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions.' + ns.name + ' to=assistant<|message|>' + m.content | tojson }}
        {{- '<|end|>' }}
    {%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}"""

HERMES = """\
{%- for m in messages %}
    {%- if m.role in ('user', 'system') or (m.role == 'assistant' and not m.tool_calls) %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- for call in m.tool_calls %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>tool\n<tool_response>\n' + m.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

GRANITE = """\
{%- set ns = namespace(thinking=false) %}
{%- for m in messages if m.role == 'control' and m.content == 'thinking' %}
    {%- set ns.thinking = true %}
{%- endfor %}
{{- '<|system|>You are Granite.' + (' Think first.' if ns.thinking else '') + '\n' }}
{%- for m in messages if m.role in ('user', 'assistant') %}
    {{- '<|' + m.role + '|>' + m.content + '\n' }}
{%- endfor %}"""

TEMPLATES = {
    name: value for name, value in globals().items() if name.isupper() and isinstance(value, str)
}
