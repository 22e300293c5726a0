// SPDX-License-Identifier: Apache-2.0

package gotool

import (
	"strings"
	"testing"
)

func TestErrorNamesMissingGoCommand(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := Build(t.Context(), Etcd)
	if err == nil || !strings.Contains(err.Error(), "needs the go command") {
		t.Errorf("error %v, want one that names the missing command", err)
	}
}

func TestErrorNamesUnknownProgram(t *testing.T) {
	_, err := Build(t.Context(), "example.com/no/such/program")
	if err == nil || !strings.Contains(err.Error(), "build example.com/no/such/program") {
		t.Errorf("error %v, want one that names the program", err)
	}
}
