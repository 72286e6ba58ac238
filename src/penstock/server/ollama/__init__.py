"""Ollama's dialect: chats, prompts, embeddings, and the routes of models, in lines of JSON."""
