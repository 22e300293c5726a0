// SPDX-License-Identifier: Apache-2.0

// Command release makes parts of a release for hack/release. Its output depends only on
// its input. Each PROGRAM was built from the checkout in the current directory.
//
//	release version PROGRAM        prints the version of a program
//	release updates PROGRAM        fails if modules of a program have newer patches
//	release licences PROGRAM       prints the licences of the modules of a program
//	release sbom PROGRAM [DEB...]  prints a bill of materials
//	release provenance FILE... [DEB...]
//	                               prints how the files were made, for SLSA
//	release image FILE NAME LICENCES PLATFORM=PROGRAM[,DIRECTORY]...
//	                               writes an image as an OCI layout, and prints its digest
//
// The image contains the program and the files of the directories LICENCES and DIRECTORY.
// On Linux, it also contains the certificates of public authorities. Each DEB is a package
// of Debian, from which DIRECTORY was made.
package main

import (
	"errors"
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
	case len(args) == 2 && args[0] == "version":
		p, err := readProgram(args[1])
		if err != nil {
			return err
		}
		version, err := p.version()
		if err != nil {
			return err
		}
		fmt.Println(version)
		return nil
	case len(args) == 2 && args[0] == "updates":
		return checkUpdates(args[1])
	case len(args) == 2 && args[0] == "licences":
		return printLicences(os.Stdout, args[1])
	case len(args) > 1 && args[0] == "sbom":
		return printSBOM(os.Stdout, args[1], args[2:])
	case len(args) > 1 && args[0] == "provenance":
		return printProvenance(os.Stdout, args[1:])
	case len(args) > 4 && args[0] == "image":
		digest, err := writeImage(args[1], args[2], args[3], args[4:])
		if err != nil {
			return fmt.Errorf("write image %s: %w", args[2], err)
		}
		fmt.Println(digest)
		return nil
	}
	return errors.New("usage: release version PROGRAM | updates PROGRAM | licences PROGRAM | sbom PROGRAM [DEB...] | provenance FILE... [DEB...] | image FILE NAME LICENCES PLATFORM=PROGRAM[,DIRECTORY]")
}
