"""Chat templates with the tool-call parts of the published ones, in their constructs: what a history looks like to the model.

Written from the public templates of Qwen3-Coder and Qwen3.5, GLM-4.6 and GLM-4.7, DeepSeek-V3 and V3.1, gpt-oss, Mistral Small
3.2, and the pythonic templates that vLLM documents for Llama 3.2 and 4.
"""

QWEN3_CODER = """\
{%- if tools %}
    {{- "<|im_start|>system\\n# Tools\\n\\nYou have access to the following functions:\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" ~ tool.function.name ~ (tool.function | tojson) }}{%- endfor %}
    {{- "\\n</tools>\\n<tool_call>\\n<function=example_function_name>\\n</function>\\n</tool_call><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls is defined and message.tool_calls %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content is defined and message.content is string and message.content | trim | length > 0 %}
            {{- '\\n' + message.content | trim + '\\n' }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n<function=' + tool_call.name + '>\\n' }}
            {%- for args_name, args_value in tool_call.arguments | items %}
                {{- '<parameter=' + args_name + '>\\n' }}
                {{- args_value if args_value is string else args_value | tojson }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>\\n<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_GLM = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
# Tools
<tools>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
</tools>{%- endif -%}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ m.content }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{{- '\\n<think></think>' }}
{%- if m.content and m.content.strip() -%}
{{ '\\n' + m.content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
CALL{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- '\\n<tool_response>\\n' }}{{- m.content }}{{- '\\n</tool_response>' }}
{%- elif m.role == 'system' -%}
<|system|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' }}{%- endif -%}
"""
_VALUE = "v | tojson(ensure_ascii=False) if v is not string else v"
GLM = _GLM.replace(
    "CALL",
    "{{- '\\n<tool_call>' + tc.name + '\\n' }}{%- for k, v in tc.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{- " + _VALUE + " }}{{- '</arg_value>\\n' }}"
    "{%- endfor %}{{- '</tool_call>' }}",
)
GLM47 = _GLM.replace(
    "CALL",
    "{{- '<tool_call>' + tc.name }}{%- for k, v in tc.arguments.items() %}"
    "{{- '<arg_key>' + k + '</arg_key><arg_value>' }}{{- " + _VALUE + " }}{{- '</arg_value>' }}"
    "{%- endfor %}{{- '</tool_call>' }}",
)

_DEEPSEEK = """\
{%- set ns = namespace(is_first=false, is_tool=false, is_last_user=false) -%}
{{ bos_token }}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}{{ message['content'] }}{%- endif -%}
  {%- if message['role'] == 'user' -%}
    {%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_last_user = true -%}
    {{'<｜User｜>' + message['content']}}
  {%- endif -%}
  {%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none -%}
    {%- if ns.is_last_user -%}{{'<｜Assistant｜>'}}{%- endif -%}
    {%- set ns.is_last_user = false -%}{%- set ns.is_first = false -%}{%- set ns.is_tool = false -%}
    {%- for tool in message['tool_calls'] -%}
      {%- if not ns.is_first -%}
        {{ (message['content'] or '') + '<｜tool▁calls▁begin｜>' }}
        {%- set ns.is_first = true -%}
      {%- else -%}{{'BETWEEN'}}{%- endif -%}
      {{'CALL'}}
    {%- endfor -%}{{'<｜tool▁calls▁end｜><|endoftext|>'}}
  {%- endif -%}
  {%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) -%}
    {%- if ns.is_last_user -%}{{'<｜Assistant｜>'}}{%- endif -%}
    {%- set ns.is_last_user = false -%}{{message['content'] + '<|endoftext|>'}}
  {%- endif -%}
  {%- if message['role'] == 'tool' -%}
    {%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}
    {{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool -%}{{'<｜Assistant｜>'}}{%- endif %}
"""
_NAME, _ARGUMENTS = "' + tool['function']['name'] + '", "' + tool['function']['arguments'] + '"
DEEPSEEK_V31 = _DEEPSEEK.replace("BETWEEN", "").replace(
    "CALL", f"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>{_ARGUMENTS}<｜tool▁call▁end｜>"
)
DEEPSEEK_V3 = _DEEPSEEK.replace("BETWEEN", "\\n").replace(
    "CALL", f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}\\n```json\\n{_ARGUMENTS}\\n```<｜tool▁call▁end｜>"
)

HARMONY = """\
{{- "<|start|>system<|message|>You are a model.\\n\\nReasoning: " + (reasoning_effort or "medium") + "<|end|>" }}
{%- if tools %}
    {{- "<|start|>developer<|message|># Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n" }}
    {%- for tool in tools %}{{- "type " + tool.function.name + " = (_: any) => any;\\n\\n" }}{%- endfor %}
    {{- "} // namespace functions<|end|>" }}
{%- endif %}
{%- set last_tool_call = namespace(name=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "tool_calls" in message %}
            {%- set tool_call = message.tool_calls[0] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.thinking %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
            {%- elif message.content %}
                {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
            {%- endif %}
            {{- "<|start|>assistant to=" }}
            {{- "functions." + tool_call.name + "<|channel|>commentary json<|message|>" }}
            {{- tool_call.arguments|tojson }}
            {{- "<|call|>" }}
            {%- set last_tool_call.name = tool_call.name %}
        {%- else %}
            {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
        {%- endif %}
    {%- elif message.role == 'tool' -%}
        {{- "<|start|>functions." + last_tool_call.name }}
        {{- " to=assistant<|channel|>commentary<|message|>" + message.content|tojson + "<|end|>" }}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""

MISTRAL_ARGS = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] or "" }}
        {%- for tool_call in message.tool_calls or [] %}
            {{- "[TOOL_CALLS]" + tool_call.function.name + "[ARGS]" }}{{- tool_call.function.arguments | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS]" + message.tool_call_id + "[TOOL_CONTENT]" + message.content + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- "[SYSTEM_PROMPT]" + message.content + "[/SYSTEM_PROMPT]" }}
    {%- endif %}
{%- endfor %}
"""

MISTRAL_LIST = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message["role"] == "user" %}
        {%- if tools %}{{- "[AVAILABLE_TOOLS]" + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}{%- endif %}
        {{- "[INST]" + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS][" }}
        {%- for tool_call in message.tool_calls %}
            {{- '{"name": "' + tool_call.function.name + '", "arguments": ' }}{{- tool_call.function.arguments | tojson + "}" }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- "[TOOL_RESULTS]" + message.content + "[/TOOL_RESULTS]" }}
    {%- endif %}
{%- endfor %}
"""

PYTHONIC = """\
{{- bos_token }}
{%- macro literal(v) -%}
    {%- if v is none -%}None{%- elif v is true -%}True{%- elif v is false -%}False
    {%- elif v is mapping -%}
        {{- "{" }}{%- for k, w in v | items -%}
            {{- k | tojson + ": " + literal(w) }}{%- if not loop.last -%}{{- ", " }}{%- endif -%}
        {%- endfor -%}{{- "}" }}
    {%- elif v is sequence and v is not string -%}
        {{- "[" }}{%- for w in v -%}{{- literal(w) }}{%- if not loop.last -%}{{- ", " }}{%- endif -%}{%- endfor -%}{{- "]" }}
    {%- else -%}{{- v | tojson }}{%- endif -%}
{%- endmacro -%}
{%- for message in messages %}
    {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
    {%- if tools and loop.first %}
        {{- "Respond with [func_name1(params_name1=params_value1)]\\n" + (tools | tojson) + "\\n" }}
    {%- endif %}
    {%- if message.tool_calls %}
        {{- "[" }}
        {%- for tool_call in message.tool_calls %}
            {%- set call = tool_call.function %}
            {{- call.name + "(" }}
            {%- for key, value in call.arguments | items %}
                {{- key + "=" + literal(value) }}{%- if not loop.last %}{{- ", " }}{%- endif %}
            {%- endfor %}
            {{- ")" }}{%- if not loop.last %}{{- ", " }}{%- endif %}
        {%- endfor %}
        {{- "]" }}
    {%- else %}{{- message.content }}{%- endif %}
    {{- "<|eot_id|>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}
"""

LLAMA_JSON = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + message.role + "<|end_header_id|>\\n\\n" }}
        {%- if tools and loop.first %}{{- tools | tojson + "\\n" }}{%- endif %}
        {{- message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}{%- endif %}
"""
