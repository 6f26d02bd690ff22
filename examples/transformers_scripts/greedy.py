"""An ordinary transformers script: greedy decoding."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("def main(argv):\n", return_tensors="pt")
output = model.generate(**inputs, do_sample=False, max_new_tokens=60)
print(tokenizer.decode(output[0], skip_special_tokens=True))
