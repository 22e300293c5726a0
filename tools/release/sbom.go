// SPDX-License-Identifier: Apache-2.0

package main

import (
	"debug/buildinfo"
	"encoding/json"
	"io"
	"runtime/debug"
	"strings"
)

// component is a component of a bill of materials in the format CycloneDX.
type component struct {
	Type    string `json:"type"`
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	PURL    string `json:"purl"`
}

// printSBOM writes a bill of materials with the modules that a program contains, and with
// Go's standard library.
func printSBOM(to io.Writer, program string) error {
	info, err := buildinfo.ReadFile(program)
	if err != nil {
		return err
	}
	type metadata struct {
		Component component `json:"component"`
	}
	bom := struct {
		BOMFormat   string      `json:"bomFormat"`
		SpecVersion string      `json:"specVersion"`
		Version     int         `json:"version"`
		Metadata    metadata    `json:"metadata"`
		Components  []component `json:"components"`
	}{"CycloneDX", "1.5", 1, metadata{module("application", &info.Main)}, nil}
	bom.Components = append(bom.Components,
		module("library", &debug.Module{Path: "stdlib", Version: strings.TrimPrefix(info.GoVersion, "go")}))
	for _, dependency := range info.Deps {
		if dependency.Replace != nil {
			dependency = dependency.Replace
		}
		bom.Components = append(bom.Components, module("library", dependency))
	}
	encoder := json.NewEncoder(to)
	encoder.SetIndent("", "  ")
	return encoder.Encode(bom)
}

func module(kind string, m *debug.Module) component {
	return component{kind, m.Path, m.Version, "pkg:golang/" + m.Path + "@" + strings.ReplaceAll(m.Version, "+", "%2B")}
}
