// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"fmt"
	"os"
	"strings"
)

// Block is a block of commands in a page of the documentation.
type Block struct {
	// Heading is the last heading before the block, without its number signs.
	Heading  string
	Commands string
}

// KubeadmBlocks returns commands of docs/operate/migrate.md, in their order. They move a
// cluster of kubeadm to kpng and back.
func KubeadmBlocks() ([]Block, error) {
	page, err := os.ReadFile("../../docs/operate/migrate.md")
	if err != nil {
		return nil, err
	}
	_, section, _ := strings.Cut(string(page), "\n### On a cluster of kubeadm\n")
	section, _, _ = strings.Cut(section, "\n### ")
	var blocks []Block
	heading, isCommand := "", false
	for line := range strings.Lines(section) {
		title, isHeading := strings.CutPrefix(line, "#### ")
		switch {
		case line == "```sh\n":
			isCommand = true
			blocks = append(blocks, Block{Heading: heading})
		case line == "```\n":
			isCommand = false
		case isCommand:
			blocks[len(blocks)-1].Commands += line
		case isHeading:
			heading = strings.TrimSpace(title)
		}
	}
	if len(blocks) < 8 {
		return nil, fmt.Errorf("docs/operate/migrate.md has %d blocks of commands for clusters of kubeadm", len(blocks))
	}
	return blocks, nil
}
