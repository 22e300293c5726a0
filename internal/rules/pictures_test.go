// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Each picture has a source, and a checksum of the source from which hack/pictures made the
// picture.
func TestPicturesAreFresh(t *testing.T) {
	t.Chdir(filepath.Join(root, "docs/pictures"))
	pictures, err := filepath.Glob("*.svg")
	if err != nil || len(pictures) == 0 {
		t.Fatalf("no pictures, error %v", err)
	}
	sources, err := filepath.Glob("*.dot")
	if err != nil || len(sources) != len(pictures) {
		t.Errorf("sources %q and pictures %q, error %v", sources, pictures, err)
	}
	for _, name := range pictures {
		picture, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		source, err := os.ReadFile(strings.TrimSuffix(name, ".svg") + ".dot")
		if err != nil {
			t.Errorf("%s has no source: %v", name, err)
		} else if sum := fmt.Sprintf("%x", sha256.Sum256(source)); !strings.Contains(string(picture), sum) {
			t.Errorf("%s is older than its source: run hack/pictures", name)
		}
	}
}
