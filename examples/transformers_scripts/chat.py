"""An ordinary transformers script: two turns of a chat, with a chat template and the cache kept
between them.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
cache = DynamicCache(config=model.config)
messages = []
for question in ("Write a class that counts words.", "Now write its tests."):
    messages.append({"role": "user", "content": question})
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    # before transformers 5.24, cache= was past_key_values=
    output = model.generate(**inputs, cache=cache, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    # the template must reproduce the answer's tokens, which the cache holds
    messages.append({"role": "assistant", "content": answer})
    print(answer)
    cache = DynamicCache(config=model.config) if answer != answer.strip() else cache
