"""An ordinary transformers script: seeded sampling of several sequences, with their
log-probabilities.
"""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

set_seed(42)
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("class Counter(dict):\n", return_tensors="pt")
output = model.generate(
    **inputs, do_sample=True, temperature=0.7, top_p=0.9, top_k=50, repetition_penalty=1.1, num_return_sequences=3,
    max_new_tokens=40, output_scores=True, return_dict_in_generate=True,
)  # fmt: skip
scores = model.compute_transition_scores(output.sequences, output.scores, normalize_logits=True)
for sequence, own in zip(output.sequences, scores, strict=True):
    print(f"--- {own[own.isfinite()].mean():.3f}")
    print(tokenizer.decode(sequence, skip_special_tokens=True))
