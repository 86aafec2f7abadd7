"""The peer of benches/decode.rs: the same checkpoint, context and steps in transformers (sdpa, float32, dynamic cache).

usage: transformers_peer.py CHECKPOINT SEQUENCES PROMPT STEPS ROUNDS
Prints the best decode tokens a second and the best seconds of one prompt's prefill.
"""

import sys
import time

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

path = sys.argv[1]
sequences, prompt, steps, rounds = (int(number) for number in sys.argv[2:6])
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()
torch.manual_seed(1)
best_decode, best_prefill = 0.0, float("inf")
with torch.inference_mode():
    for _ in range(rounds):
        ids = torch.randint(0, model.config.get_text_config().vocab_size, (sequences, prompt))
        started = time.perf_counter()
        model(input_ids=ids[:1], past_key_values=DynamicCache(config=model.config), use_cache=True, logits_to_keep=1)
        best_prefill = min(best_prefill, time.perf_counter() - started)
        cache = DynamicCache(config=model.config)
        out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token = out.logits[:, -1].argmax(-1, keepdim=True)
        started = time.perf_counter()
        for _ in range(steps):
            out = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
        best_decode = max(best_decode, steps * sequences / (time.perf_counter() - started))
print(best_decode, best_prefill)
