"""Entry point of the demo as a Space: ``python app.py``."""

import os

from hf_slospec.demo.serve import Options, serve

if __name__ == "__main__":
    serve(Options(allows_no_password="SPACE_ID" in os.environ))  # a Space is open to all on purpose
