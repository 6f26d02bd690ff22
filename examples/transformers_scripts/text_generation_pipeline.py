"""An ordinary transformers script: a text-generation pipeline, one prompt and several in batches."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline, set_seed

set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
print(generator("def main():\n", max_new_tokens=30, do_sample=False)[0]["generated_text"])
for answers in generator(
    ["import sys\n", "for key in "], max_new_tokens=20, do_sample=True, batch_size=2
):
    print(answers[0]["generated_text"])
