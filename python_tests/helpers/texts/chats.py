"""Chat templates for the bundled model, which has none."""

# Messages become Python comments.
TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
# Special tokens around messages, so that an answer is tokenized again as it was generated.
MARKED = (
    "{% for m in messages %}# {{ m.role }}{{ eos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}# assistant{{ eos_token }}{% endif %}"
)
