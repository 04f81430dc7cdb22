"""Serves like ``vllm serve``, whose own script wants the metadata of an installed vLLM."""

from __future__ import annotations

if __name__ == "__main__":
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    options = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(options)
    ServeSubcommand.cmd(options)
