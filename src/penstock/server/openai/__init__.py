"""OpenAI's dialect: chat, completions, Responses, embeddings, and the routes of models and adapters."""
