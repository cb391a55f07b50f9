"""Samples of a run for people: found, decoded and put into words. It only ever reads the run.

listing   samples by text, reward, length, step, prompt, version or error     run.db and search.db
decoding  tokens as text, piece by piece                                     the run's tokenizer
sample    one sample in full: prompt, turns, tokens, log-probs, advantage    run.db and samples-N.db
index     search.db: words, what filters compare, and how each prompt did over time; written by a process of its own
prompts   prompts by pass rate over time                                     search.db
console   all of it as plain text, whatever the samples contain
"""
