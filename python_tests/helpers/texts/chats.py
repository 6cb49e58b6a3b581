"""A chat template for the bundled model, which has none: messages become Python comments."""

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:{% endif %}"
)
