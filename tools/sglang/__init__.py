"""Real SGLang on CPU as a process of its own."""
