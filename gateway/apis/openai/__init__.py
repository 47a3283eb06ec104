"""OpenAI's dialect: Chat Completions, Completions, models; and the tokenizer endpoints in the shape vLLM gave them."""
