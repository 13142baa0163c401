"""Models: brings one onto this machine as a folder in Hugging Face format.

gguf       a GGUF file, dequantised        packaged   small pretrained models that come as Python packages
"""
