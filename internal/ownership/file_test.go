// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kpng-project/kpng/sink"
)

func TestFileHasOneOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "state", "a.journal")
	release, err := File(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = File(path)
	if !errors.Is(err, sink.ErrOwned) || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), fmt.Sprintf("process %d: ", os.Getpid())) {
		t.Errorf("second owner: %v", err)
	}
	other, err := File(path + "2")
	if err != nil {
		t.Errorf("another state file: %v", err)
	}
	release()
	again, err := File(path)
	if err != nil {
		t.Fatalf("after the release: %v", err)
	}
	other()
	again()
	if release, err := File(""); err != nil {
		t.Errorf("without a state file: %v", err)
	} else {
		release()
	}
}
