"""The OpenAI-compatible server.

Reading order:

1. `__main__`, `flags`, `launcher`: from a command line to a server that listens.
2. `app`: all endpoints behind all checks; `guard` and `refusals` are those checks and
   what is answered when something fails.
3. `generation`: the endpoints that generate. A body (`protocol`) becomes `params` and
   `prompts`, that of a response by way of a chat (`response_input`); `serving` brings
   them to the engine, past `admission`, and `streams` joins what comes back;
   `completions`, `chat_completions` and `responses` write it (`writing`, `logprobs`,
   `usage`), and `connection` sends it while somebody is there.
4. `about` and `metrics`: what the server tells about itself; `page`, which shows it.
"""
