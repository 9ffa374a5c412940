"""Run by test_speculation.py, one engine per process: vLLM takes only one that speculates.

usage: spec_child.py MODEL OPTIONS SPECULATE: folder, kvoffload's options as JSON ("null" = no connector), 0 or 1.
Prints one line of JSON: per round (cold, after the pages were forgotten, second turn) the tokens, and how many of each
prompt were not computed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TOKENS = 60
ROUNDS = ("cold", "again", "next turn")


def main() -> None:
    model, options, speculate = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3] == "1"
    import runner

    changes = {}
    if speculate:
        changes["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
        }  # fmt: skip
    few = [11, 12]
    asked = runner.prompts()
    said = {}
    with runner.Engine(model, options, **changes) as engine:
        for name in ROUNDS:
            if options is not None and name != "cold":
                engine.forget_pages()
            if name == "next turn":
                asked = [p + list(said["cold"][0][i]) + [5, 6, 7] for i, p in enumerate(asked)]
            tokens, cached = [], []
            for some in [[p] for p in asked] if name == "cold" else [asked]:
                answers = engine.generate(some, TOKENS, allowed_token_ids=few)
                if options is not None:
                    engine.settle()  # a small host tier drops what comes faster than its disk writes
                tokens += answers.tokens
                cached += answers.cached
            said[name] = (tokens, cached)
        drafts = engine.metric("spec_decode_num_accepted_tokens") if speculate else 0
    print(json.dumps({"said": said, "accepted": drafts}))


if __name__ == "__main__":
    main()
