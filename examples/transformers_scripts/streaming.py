"""An ordinary transformers script: streaming to the screen, and to a loop in another thread."""

import sys
from threading import Thread

from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, TextStreamer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
inputs = tokenizer("    def close(self):\n", return_tensors="pt")
model.generate(**inputs, streamer=TextStreamer(tokenizer), max_new_tokens=30, do_sample=False)

streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
thread = Thread(
    target=model.generate,
    kwargs=dict(inputs, streamer=streamer, max_new_tokens=30, do_sample=False),
)
thread.start()
print("".join(streamer))
thread.join()
