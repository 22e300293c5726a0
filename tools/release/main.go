// SPDX-License-Identifier: Apache-2.0

// Command release makes parts of a release for hack/release. Its output depends only on
// its input.
//
//	release image DIRECTORY ARCHITECTURE=PROGRAM...   writes an image of Linux as an OCI layout
//	release sbom PROGRAM                              prints a bill of materials
//
// The image contains the program and the certificates of public authorities.
package main

import (
	"fmt"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) > 2 && args[0] == "image":
		digest, err := writeImage(args[1], args[2:])
		if err != nil {
			return fmt.Errorf("write image: %w", err)
		}
		fmt.Println(digest)
		return nil
	case len(args) == 2 && args[0] == "sbom":
		return printSBOM(os.Stdout, args[1])
	}
	return fmt.Errorf("usage: release image DIRECTORY ARCHITECTURE=PROGRAM... | release sbom PROGRAM")
}
