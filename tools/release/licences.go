// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
)

// certificates describes the certificates in the image. The module that contains the
// certificates has only the licence of its own code.
const certificates = `The image of kpng contains certificates of authorities in the file
/etc/ssl/certs/ca-certificates.crt. They come from Mozilla's list of authorities, whose source
is https://hg.mozilla.org/projects/nss/raw-file/tip/lib/ckfw/builtins/certdata.txt. This list is
available under the Mozilla Public License 2.0, https://mozilla.org/MPL/2.0/.
`

// printLicences writes the licences and notices of all third-party modules that a program
// contains, and of Go's standard library. A text that several modules have in common
// appears once.
func printLicences(to io.Writer, file string) error {
	p, err := readProgram(file)
	if err != nil {
		return err
	}
	modules, err := p.modules()
	if err != nil {
		return err
	}
	var texts [][]byte
	users := map[string][]string{}
	for _, m := range modules[1:] { // without the main module
		for _, file := range m.licences {
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if users[string(text)] == nil {
				texts = append(texts, text)
			}
			if user := m.Path + " " + m.Version; !slices.Contains(users[string(text)], user) {
				users[string(text)] = append(users[string(text)], user)
			}
		}
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "kpng contains modules of others. These are their licences and notices.\n\n%s", certificates)
	for _, text := range texts {
		fmt.Fprintf(&out, "\n%s\n", bytes.Repeat([]byte("="), 80))
		for _, user := range users[string(text)] {
			fmt.Fprintln(&out, user)
		}
		fmt.Fprintf(&out, "%s\n\n%s\n", bytes.Repeat([]byte("-"), 80), bytes.TrimRight(text, "\n"))
	}
	_, err = to.Write(out.Bytes())
	return err
}
