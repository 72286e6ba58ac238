"""Chat templates of checkpoints that never bring one, as `mistral_common` builds their prompts."""

_VOXTRAL = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{ content }}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == "audio" -%}
                [BEGIN_AUDIO][AUDIO]
            {%- else -%}
                {{ part.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{{ bos_token }}
{%- for message in messages -%}
    {%- if message.role == "system" -%}
        [SYSTEM_PROMPT]{{ render(message.content) }}[/SYSTEM_PROMPT]
    {%- elif message.role == "user" -%}
        [INST]{{ render(message.content) }}[/INST]
    {%- elif message.role == "assistant" -%}
        {{ render(message.content) }}{{ eos_token }}
    {%- else -%}
        {{ raise_exception("the roles are system, user and assistant") }}
    {%- endif -%}
{%- endfor -%}
"""
KNOWN_TEMPLATES = {"voxtral": _VOXTRAL}
"""By `model_type` of config.json."""
