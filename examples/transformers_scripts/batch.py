"""An ordinary transformers script: a left-padded batch with stop strings."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
prompts = [
    "import os\n",
    "def read(self, size=-1):\n    ",
    "class Error(Exception):\n    pass\n\n\nclass ",
]
inputs = tokenizer(prompts, return_tensors="pt", padding=True)
output = model.generate(
    **inputs,
    max_new_tokens=50,
    do_sample=False,
    stop_strings=["return", "raise"],
    tokenizer=tokenizer,
)
for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print("---")
    print(text)
