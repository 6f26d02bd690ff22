"""Entry point of the demo as a Space: ``python app.py``."""

from hf_slospec.demo.serve import Options, serve

if __name__ == "__main__":
    serve(Options())
